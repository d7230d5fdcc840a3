"""How far a fit is, as a server like that of Kubeflow's controller gets it."""

import http.server
import json
import ssl
import subprocess
import threading

import pytest
import torch

import flatout
from flatout.train.callbacks.train_job_status import TrainJobStatus, asked_for

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/job/status"


class Controller(http.server.ThreadingHTTPServer):
    """Checks token and body as Kubeflow's does, and keeps what it was told."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.told, self.code = [], 200
        certificate = folder / "ca.crt"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
             "-nodes", "-keyout", folder / "key", "-out", certificate, "-days", "2",
             "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
            check=True, capture_output=True,
        )  # fmt: skip
        (folder / "token").write_text("first\n")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, folder / "key")
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.tokens = ["first"]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        token = self.headers["Authorization"].removeprefix("Bearer ")
        code = 404 if self.path != PATH else 403 if token not in self.server.tokens else 200
        code = self.server.code if code == 200 else code
        if code == 200:
            self.server.told.append(body)
        self.send_response(code)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments):
        pass


@pytest.fixture
def controller(tmp_path, monkeypatch):
    server = Controller(tmp_path)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    port = server.server_address[1]
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://localhost:{port}{PATH}")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    yield server
    server.shutdown()
    server.server_close()


def fit(epochs=3, callbacks=()):
    torch.manual_seed(0)
    trainer = flatout.Trainer(torch.nn.Linear(4, 2), loss="cross_entropy", lr=0.1, allow="exact")
    data = (torch.randn(64, 4), torch.randint(0, 2, (64,)))
    trainer.fit(data, batch_size=16, epochs=epochs, callbacks=list(callbacks), progress=False)
    return trainer.model.weight.detach().clone()


class Wait(flatout.Callback):
    """Holds an epoch's end until the controller was told something of it."""

    def __init__(self, controller):
        self._controller = controller

    def on_epoch_end(self, state):
        count = len(self._controller.told)
        for _ in range(1000):
            if len(self._controller.told) > count + 1:
                return
            threading.Event().wait(0.01)


def test_kubeflow_is_told_how_far_a_fit_is(controller, monkeypatch, tmp_path):
    monkeypatch.setattr(TrainJobStatus.__init__, "__defaults__", (0.01,))
    weights = fit(callbacks=[Wait(controller)])
    statuses = [one["trainerStatus"] for one in controller.told]
    percents = [one["progressPercentage"] for one in statuses]
    assert percents == sorted(percents)
    assert percents[0] == 0
    assert percents[-1] == 100
    assert {33, 66} <= set(percents)
    assert statuses[-1]["estimatedRemainingSeconds"] == 0
    assert any(one.get("estimatedRemainingSeconds", -1) >= 0 for one in statuses[:-1])
    assert statuses[-1]["metrics"][0]["name"] == "loss"
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL")
    assert asked_for() == []
    assert torch.equal(fit(), weights)


def test_tokens_are_read_again_since_they_change(controller, tmp_path):
    fit(1)
    controller.tokens = ["second"]
    (tmp_path / "token").write_text("second")
    count = len(controller.told)
    fit(1)
    assert len(controller.told) > count


@pytest.mark.parametrize("how", ["refused", "no server", "no token"])
def test_training_goes_on_where_it_cannot_be_told(how, controller, monkeypatch, tmp_path, capsys):
    if how == "refused":
        controller.code = 403
    elif how == "no server":
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://localhost:1/status")
    else:
        (tmp_path / "token").unlink()
    fit(1)
    said = capsys.readouterr().err
    assert said.count("progress cannot be reported to Kubeflow, training goes on") == 1
    assert controller.told == []


def test_a_fit_that_fails_does_not_end_at_100(controller):
    class Broken(flatout.Callback):
        def on_epoch_end(self, state):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fit(1, [Broken()])
    assert all(one["trainerStatus"]["progressPercentage"] < 100 for one in controller.told)
