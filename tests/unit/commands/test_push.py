"""`convert --push` uploads a model with its card, to a stand-in of the Hub's API on this machine."""

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from megatron_rl.cli import main
from megatron_rl.config.load import config_to_yaml, load_config
from megatron_rl.tracking.metrics_file import MetricsWriter

WEIGHTS = bytes(range(256)) * 40


class Hub:
    """The parts of the Hub's API that an upload calls: create, preupload, LFS batch and upload, commit."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        """Content of the committed files."""
        self.created: list[dict[str, object]] = []
        self.tokens: set[str] = set()
        self.status = 200
        """HTTP status of every reply to a commit."""
        self._objects: dict[str, bytes] = {}
        self.url = ""

    def reply(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.url}/me/model"}
        if path == "/api/models/me/model/preupload/main":
            modes = [(file["path"], "lfs" if file["path"].endswith(".safetensors") else "regular") for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes]}
        if path == "/me/model.git/info/lfs/objects/batch":
            return 200, {"transfer": "basic", "objects": [
                {**one, "actions": {"upload": {"href": f"{self.url}/upload/{one['oid']}"}}} for one in json.loads(body)["objects"]
            ]}  # fmt: skip
        if path.startswith("/upload/") and method == "PUT":
            self._objects[path.rpartition("/")[2]] = body
            return 200, {}
        if path == "/api/models/me/model/commit/main":
            for line in map(json.loads, body.splitlines()) if self.status == 200 else ():
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self._objects[value["oid"]]
            return self.status, {"commitUrl": f"{self.url}/me/model/commit/abc", "commitOid": "abc", "success": True}
        return 404, {"error": f"{method} {path}"}


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            hub.tokens.add(self.headers.get("Authorization", ""))
            status, found = hub.reply(self.command, self.path.partition("?")[0], body)
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _handle

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield hub
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture
def run(tmp_path):
    """A finished run with a policy."""
    folder = tmp_path / "run"
    policy = folder / "policy"
    policy.mkdir(parents=True)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = load_config(None, ["preset=grpo", f"data.train_files=[{tmp_path}/train.jsonl]", "run.num_steps=2"])
    config.policy.path = "/cache/models--Qwen--Qwen3-0.6B/snapshots/0a1b"
    (folder / "config.yaml").write_text(config_to_yaml(config))
    writer = MetricsWriter(folder / "metrics.jsonl")
    writer.log(1, {"eval/accuracy": 0.25, "reward/mean": 0.5, "time/generate_s": 3.0})
    writer.log(2, {"reward/mean": 0.75})
    writer.close()
    for name, content in {"config.json": b"{}", "model.safetensors": WEIGHTS, ".hidden": b"x", "README.md": b"old"}.items():
        (policy / name).write_bytes(content)
    return folder


def test_model_is_pushed_with_a_card_of_its_run(run, hub, capsys):
    assert main(["convert", "--input", str(run / "policy"), "--push", "me/model", "--private"]) == 0
    assert f"pushed: {hub.url}/me/model/commit/abc" in capsys.readouterr().err
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md"} and hub.files["model.safetensors"] == WEIGHTS
    assert hub.created[0]["name"] == "model" and hub.created[0]["organization"] == "me" and hub.created[0]["visibility"] == "private"
    assert "Bearer hf_secret" in hub.tokens
    card = hub.files["README.md"].decode()
    assert "base_model:\n- Qwen/Qwen3-0.6B\n" in card and "preset: grpo" in card
    # Metrics: the newest value of each; timings are left out.
    assert "| reward/mean | 0.75 |" in card and "| eval/accuracy | 0.25 |" in card and "time/" not in card
    assert re.search(r"train\.jsonl` \| 34 \| `[0-9a-f]{64}`", card)
    assert re.search(r"megatron-rl \S+\npython 3\.\S+\ntorch \S+", card) and re.search(r"commit ([0-9a-f]{40}|unknown)", card)


def test_record_next_to_the_weights_describes_a_supervised_model(tmp_path, hub):
    model = tmp_path / "a" / "b" / "sft"
    model.mkdir(parents=True)
    for name, content in {"config.json": "{}", "model.safetensors": "x"}.items():
        (model / name).write_text(content)
    record = {"base_model": "models/base", "train_files": ["gone.jsonl"], "history": [{"step": 7, "train/loss": 0.125}]}
    (model / "sft_training.json").write_text(json.dumps(record))
    assert main(["convert", "--input", str(model), "--push", "me/model"]) == 0
    card = hub.files["README.md"].decode()
    assert "from `models/base`" in card and "| `gone.jsonl` | not here | |" in card and "| train/loss | 0.125 |" in card


def test_dry_run_shows_the_card_and_uploads_nothing(run, hub, capsys):
    assert main(["convert", "--input", str(run / "policy"), "--push", "me/model", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "## Recipe" in shown and "would push to me/model: config.json, model.safetensors, README.md" in shown
    assert not hub.files and not hub.created


@pytest.mark.parametrize(("status", "remedy"), [(403, "hf auth login"), (401, "HF_TOKEN"), (409, "refused it")])
def test_refusal_of_the_hub_is_one_line(run, hub, capsys, status, remedy):
    hub.status = status
    assert main(["convert", "--input", str(run / "policy"), "--push", "me/model"]) == 2
    error = capsys.readouterr().err
    assert remedy in error and "Traceback" not in error and not hub.files


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "expected --output FOLDER and --to"),
        (["--output", "x"], "expected --output FOLDER and --to"),
        (["--output", "x", "--to", "megatron", "--push", "me/model"], "use --to hf"),
        (["--push", "me/model"], "lacks config.json"),
        (["--push", "me/model", "--run", "/nowhere"], "no readable config.yaml"),
    ],
)
def test_mistakes_are_one_line_errors(tmp_path, hub, capsys, arguments, reason):
    assert main(["convert", "--input", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error and "Traceback" not in error and not hub.created
