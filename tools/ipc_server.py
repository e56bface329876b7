"""A server that takes weights by ``/update_weights_from_tensor`` as an SGLang worker does, and nothing else.

    python tools/ipc_server.py

It maps each bucket's handle (CUDA IPC, or shared memory on a CPU), copies the tensors out and replies when the copies have
run. ``/digests`` returns the SHA-256 of every tensor. The URL is printed when the server listens; it ends with its parent.
"""

import base64
import hashlib
import inspect
import io
import json
import os
import pickle
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch.multiprocessing import reductions

WEIGHTS: dict[str, torch.Tensor] = {}
VERSION = ["0"]


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


class Handles(pickle.Unpickler):
    """Maps a device's UUID in a CUDA handle to this process's number of the device, as SGLang does."""

    def find_class(self, module: str, name: str) -> Any:
        return rebuild if name == "rebuild_cuda_tensor" else super().find_class(module, name)


def rebuild(*arguments: Any) -> torch.Tensor:
    position = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters).index("storage_device")
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    device = uuids.index(arguments[position])
    return reductions.rebuild_cuda_tensor(*arguments[:position], device, *arguments[position + 1 :])


def load(body: dict[str, Any]) -> None:
    """Copy the tensors of one bucket out of the trainer's memory."""
    (handle,) = body["serialized_named_tensors"]
    bucket = Handles(io.BytesIO(base64.b64decode(handle))).load()  # from the parent process on 127.0.0.1
    flat = bucket["flattened_tensor"]
    for spec in bucket["metadata"]:
        WEIGHTS[spec.name] = flat[spec.start_idx : spec.end_idx].clone().view(spec.dtype).reshape(spec.shape)
    if flat.is_cuda:
        torch.cuda.synchronize()
    VERSION[0] = body.get("weight_version", VERSION[0])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        replies = {
            "/model_info": lambda: {"weight_version": VERSION[0]},
            "/digests": lambda: {name: digest_of(tensor) for name, tensor in WEIGHTS.items()},
        }
        self.reply(replies[self.path]())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/update_weights_from_tensor":
            load(body)
        self.reply({"success": True, "message": ""})

    def reply(self, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        pass


def end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.exit(server.serve_forever())
