"""A second simulator for few slots, in plain Python: every token of every response, one decode step after the other."""

from collections import deque
from itertools import pairwise


class Server:
    """Requests of ``prefix`` tokens that get ``new`` ones each."""

    def __init__(self, prefix, new, timing, limits):
        self.prefix, self.new, self.timing, self.limits = prefix, new, timing, limits
        self.unsent = deque(i for i in range(len(new)) if new[i] > 0)
        self.waiting, self.running, self.batches = deque(), [], []
        self.made, self.finish_s = [0] * len(new), [0.0] * len(new)
        self.now = self.context_steps = 0.0

    def run(self):
        while self.unsent or self.waiting or self.running:
            self.send()
            while self.waiting and self.has_room(self.waiting[0]):
                self.begin(self.waiting.popleft())
                self.send()
            if self.running:
                self.decode()
        return self

    def is_over(self, request):
        return self.made[request] == self.new[request]

    def send(self):
        most, size = self.limits.inflight or len(self.new), self.limits.http_batch
        while self.unsent:
            inflight = sum(len(batch) for batch in self.batches if not all(map(self.is_over, batch)))
            if inflight >= most:
                return
            batch = [self.unsent.popleft() for _ in range(min(size, most - inflight, len(self.unsent)))]
            self.batches.append(batch)
            self.waiting.extend(batch)

    def has_room(self, request):
        if self.limits.running and len(self.running) >= self.limits.running:
            return False
        held = sum(self.prefix[i] + self.new[i] for i in [*self.running, request])
        return not self.limits.kv_tokens or not self.running or held <= self.limits.kv_tokens

    def begin(self, request):
        tokens, prefill = self.prefix[request], self.timing.prefill
        self.now += prefill.row_s + prefill.token_s * tokens + prefill.square_s * tokens**2
        self.running.append(request)
        self.grow([request])

    def decode(self):
        context = sum(self.prefix[i] + self.made[i] for i in self.running)
        self.context_steps += context
        self.now += step_s(self.timing.decode, len(self.running)) + self.timing.decode.context_token_s * context
        self.grow(list(self.running))

    def grow(self, requests):
        for request in requests:
            self.made[request] += 1
            if self.is_over(request):
                self.finish_s[request] = self.now
                self.running.remove(request)


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

    def __init__(self, draw, num_slots, window_tokens, *, carries):
        self.draw, self.num_slots, self.window_tokens, self.carries = draw, num_slots, window_tokens, carries
        self.slots = []

    def step(self):
        while len(self.slots) < self.num_slots:
            prompt, length, first = self.draw()
            self.slots.append({"prompt": prompt, "length": length, "first": first, "held": 0, "new": 0})
        for slot in self.slots:
            room = slot["first"] if slot["held"] == 0 else self.window_tokens
            slot["new"] = 0
            while slot["new"] < room and slot["held"] + slot["new"] < slot["length"]:
                slot["new"] += 1
        rows = [dict(slot) for slot in self.slots]
        going_on = [slot for slot in self.slots if slot["held"] + slot["new"] < slot["length"]]
        self.slots = going_on if self.carries else []
        for slot in self.slots:
            slot["held"] += slot["new"]
        return rows
