"""A second simulator for few slots, in plain Python: every token of every response, one decode step after the other."""

from collections import deque
from itertools import pairwise
from math import ceil


class Server:
    """Requests of ``prefix`` tokens that get ``new`` ones each, of ``room`` that they might get: SGLang's scheduler, pass by pass."""

    def __init__(self, prefix, new, room, timing, limits):
        self.prefix, self.new, self.room, self.timing, self.limits = prefix, new, room, timing, limits
        self.unsent = deque(i for i in range(len(new)) if new[i] > 0)
        self.waiting, self.running, self.batches = deque(), [], []
        self.made, self.finish_s, self.retractions = [0] * len(new), [0.0] * len(new), [0] * len(new)
        self.first_ratio = self.ratio = min(0.7 * limits.conservativeness, 1)
        self.full, self.chunk, self.now, self.context_steps = False, 0, 0.0, 0.0
        sizes = {i: room[i].bit_length() for i in self.unsent}
        alike = {i: [j for j in self.unsent if sizes[j] == sizes[i]] for i in self.unsent}
        shares = {i: sum(new[j] for j in alike[i]) / sum(room[j] for j in alike[i]) for i in self.unsent}
        self.expected = {i: prefix[i] + ceil(shares[i] * room[i]) for i in self.unsent}

    def run(self):
        self.send()
        while self.unsent or self.waiting or self.running:
            if not self.prefill():
                self.decode()
            self.send()
        return self

    def is_over(self, request):
        return self.made[request] == self.new[request]

    def send(self):
        while self.unsent:
            inflight = [i for batch in self.batches if not all(map(self.is_over, batch)) for i in batch]
            batch = []
            while self.unsent and len(batch) < self.limits.http_batch and self.client_has_room([*inflight, *batch]):
                if batch and max(self.room[self.unsent[0]], self.room[batch[0]]) > 128:
                    break
                batch.append(self.unsent.popleft())
            if not batch:
                return
            self.batches.append(batch)
            self.waiting.extend(batch)

    def client_has_room(self, inflight):
        if self.limits.inflight and len(inflight) >= self.limits.inflight:
            return False
        tokens = sum(self.expected[i] for i in [*inflight, self.unsent[0]])
        return not inflight or not self.limits.kv_tokens or tokens <= self.limits.sent_share * self.limits.kv_tokens

    def available(self):
        cached = sum(self.prefix[i] + self.made[i] - 1 for i in self.running)
        return self.limits.kv_tokens - cached if self.limits.kv_tokens else float("inf")

    def prefill(self):
        if not self.chunk and (self.full or not self.waiting):
            return False
        promised = sum(min(self.room[i] - self.made[i], 4096) for i in self.running)
        free, chunk, batch = self.available() - self.ratio * promised, self.limits.prefill_tokens - self.chunk, []
        cut = self.newest if self.chunk else None
        if cut is not None:
            left = min(self.room[cut] - self.made[cut], 4096) if cut in self.running else 0
            free -= min(self.room[cut], 4096) + 1 - self.ratio * left
        while self.waiting and chunk > 0:
            request, number = self.waiting[0], len(self.running) + len(batch)
            tokens = self.prefix[request] + self.made[request]
            fits = tokens + min(self.room[request] - self.made[request], 4096) + 1 < free
            if number and (not fits or (self.limits.running and number >= self.limits.running)):
                self.full = bool(self.running)
                break
            batch.append(self.waiting.popleft())
            free -= tokens + min(self.room[request], 4096) + 1
            chunk -= tokens
        self.chunk, prefill = max(-chunk, 0), self.timing.prefill
        for request in batch:
            tokens = self.prefix[request] + self.made[request]
            self.now += prefill.row_s + prefill.token_s * tokens + prefill.square_s * tokens**2
            self.running.append(request)
            self.newest = request
            self.grow([request])
        return bool(batch) or cut is not None or not self.full

    def decode(self):
        if len(self.running) > 1 and self.available() < len(self.running):
            self.retract()
        else:
            self.ratio = max(self.ratio - self.first_ratio * 0.86 / 600, self.first_ratio * 0.14)
        context = sum(self.prefix[i] + self.made[i] for i in self.running)
        self.context_steps += context
        self.now += step_s(self.timing.decode, len(self.running)) + self.timing.decode.context_token_s * context
        self.grow(list(self.running))

    def retract(self):
        kept = sorted(self.running, key=lambda i: (self.made[i], -self.prefix[i]), reverse=True)
        while True:
            request = kept.pop()
            self.running.remove(request)
            self.retractions[request] += 1
            self.waiting.append(request)
            if len(kept) == 1 or self.available() >= len(kept):
                break
        self.full = False
        self.ratio = min((sum(self.made[i] for i in kept) + 20 * len(kept)) / (sum(self.room[i] for i in kept) + 1), 1)

    def grow(self, requests):
        for request in requests:
            self.made[request] += 1
            if self.is_over(request):
                self.finish_s[request] = self.now
                self.running.remove(request)
                self.full = False


def step_s(decode, running):
    """Of the curve, between its nodes and beyond the last one."""
    nodes, values = decode.running, decode.step_s
    if running <= nodes[0] or len(nodes) == 1:
        return values[0]
    for (a, at_a), (b, at_b) in pairwise(zip(nodes, values, strict=True)):
        if running <= b or b == nodes[-1]:
            return at_a + (at_b - at_a) * (running - a) / (b - a)


class SlotsTokenByToken:
    """Slots of windows, one dictionary each; ``draw()`` gives (prompt tokens, length, first window) of the next response."""

    def __init__(self, draw, num_slots, window_tokens, *, carries, training_window=1):
        self.draw, self.num_slots, self.window_tokens, self.carries = draw, num_slots, window_tokens, carries
        self.training_window = training_window
        self.slots = []

    def step(self):
        while len(self.slots) < self.num_slots:
            prompt, length, first = self.draw()
            self.slots.append({"prompt": prompt, "length": length, "first": first, "held": 0, "new": 0, "trained": 0})
        for slot in self.slots:
            room = slot["first"] if slot["held"] == 0 else self.window_tokens
            slot["new"] = 0
            while slot["new"] < room and slot["held"] + slot["new"] < slot["length"]:
                slot["new"] += 1
        for slot in self.slots:
            tokens = slot["held"] + slot["new"]
            missing = self.window_tokens - slot["first"] if slot["trained"] == 0 else 0
            is_due = tokens == slot["length"] or tokens - slot["trained"] + missing >= self.training_window
            slot["trains"] = tokens - slot["trained"] if is_due else 0
        rows = [dict(slot) for slot in self.slots]
        going_on = [slot for slot in self.slots if slot["held"] + slot["new"] < slot["length"]]
        self.slots = going_on if self.carries else []
        for slot in self.slots:
            slot["held"] += slot["new"]
            slot["trained"] += slot["trains"]
        return rows
