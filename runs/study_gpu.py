"""The miniature study on a machine that can only be reached by small parcels.

    pack OUT        here: models, texts and skeletons become parcels OUT/part01, part02, ...;
                    runs that are finished already (--finished) go along and are not run again
    serve           there, once, in the background: unpacks what has arrived, starts the workers
    take PARCEL     there: hands a parcel to `serve`
    status          there: what is done, what failed, how fast
    stop            there: end the workers (and forget the results)
    collect OUT     there: everything worth keeping, as OUT/results.tar.gz

Nothing is installed there: torch, transformers, accelerate, tokenizers, safetensors, numpy and yaml
are enough; `gguf` travels along. Every finished run is on disk before the next one starts.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARCEL_BYTES = 57_000_000
PART_BYTES = 15_000_000
MANIFEST = "parcels.json"
MODELS = {"student": "smollm2-135m", "qwen": "qwen2.5-coder-1.5b", "gemma": "gemma3-270m"}


# ---- pack ----


def pack(options: argparse.Namespace) -> None:
    """One stream of files in the order in which they are needed, cut into parcels."""
    stream: list[tuple[str, str, Path]] = []
    tar = options.out / "materials.tar.xz"
    options.out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(tar, "w:xz", preset=3) as archive:
        for path in sorted(options.texts.iterdir()):
            archive.add(path, f"materials/{path.name}")
        for name in options.only:
            if options.models is not None:
                skeleton = options.models.parent / "skel" / MODELS[name]
                archive.add(skeleton, f"skeletons/{name}")
        for path in options.packages:
            archive.add(path, f"packages/{path.name}", filter=_without_caches)
        for path in _finished(options.finished):
            archive.add(path, str("out" / path.relative_to(options.finished)))
    stream.append(("materials", "tar", tar))
    if options.models is not None:
        for name in options.only:
            stream.append((name, "gguf", options.models / f"{MODELS[name]}.gguf"))
    manifest = [
        {"name": name, "kind": kind, "bytes": path.stat().st_size} for name, kind, path in stream
    ]
    number, room, parcel = 0, 0, io.BytesIO()

    def flush() -> None:
        nonlocal number, parcel
        number += 1
        folder = options.out / f"part{number:02d}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:03d}.bin").write_bytes(parcel.getvalue())
        if number == 1:
            (folder / MANIFEST).write_text(json.dumps(manifest))
        parcel = io.BytesIO()

    room = options.parcel_bytes
    for _, _, path in stream:
        with open(path, "rb") as file:
            while data := file.read(min(room, 1 << 22)):
                parcel.write(data)
                room -= len(data)
                if room == 0:
                    flush()
                    room = options.parcel_bytes
    if parcel.tell():
        flush()
    tar.unlink()
    print(f"{number} parcels in {options.out}: {manifest}")


def _finished(folder: Path | None) -> list[Path]:
    """What tells that a run or a tuning is done, and whole stores. The start is made anew there."""
    if folder is None:
        return []
    patterns = ["runs/*/evaluation.json", "runs/*/selection.json", "tuning/*/evaluation.json"]
    for store in (folder / "stores").glob("*/"):
        if len(list(store.iterdir())) > 1:  # more than its manifest
            patterns += [f"stores/{store.name}/*", f"stores/{store.name}.json"]
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


def _without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name else entry


# ---- serve ----


def take(options: argparse.Namespace) -> None:
    inbox = options.folder / "inbox"
    inbox.mkdir(parents=True, exist_ok=True)
    for path in sorted(options.parcel.iterdir()):
        shutil.copyfile(path, inbox / f".{path.name}.tmp")
        os.replace(inbox / f".{path.name}.tmp", inbox / path.name)
    print(f"{len(list(inbox.glob('*.bin')))} parcels here")


def serve(options: argparse.Namespace) -> None:
    folder: Path = options.folder
    began = time.time()
    deadline = began + 60 * options.minutes
    code = folder / "code"
    folder.mkdir(parents=True, exist_ok=True)
    if not code.exists():  # later calls may bring another state of the tree
        shutil.copytree(HERE.parent / "src", code / "src")
        shutil.copytree(HERE, code / "runs")
    shutil.rmtree(folder / "out" / "failed", ignore_errors=True)  # a new start tries again
    bytecode = compile_packages()
    os.environ.update(side_by_side(folder))
    workers: list[subprocess.Popen] = []
    for name, kind, content in incoming(folder, deadline):
        started = time.time()
        if kind == "tar":
            with tarfile.open(content) as archive:
                archive.extractall(folder, filter="data")
            with contextlib.suppress(subprocess.TimeoutExpired):
                bytecode.wait(30)
            workers = start_workers(options, deadline)
        else:
            target = folder / "materials" / name
            tool = [sys.executable, str(code / "runs" / "gguf_folder.py")]
            source = [str(content), str(folder / "skeletons" / name), str(target)]
            if not target.exists():
                subprocess.run([*tool, *source], env=environment(folder), check=True)
            content.unlink()
        print(f"[{time.time() - began:6.1f}] {name}: {time.time() - started:.1f} s", flush=True)
    for worker in workers:
        worker.wait(max(1.0, deadline + 120 - time.time()))
    print(f"[{time.time() - began:6.1f}] all workers have ended", flush=True)


def compile_packages() -> subprocess.Popen:
    """Bytecode for all packages, in the background. Where an image has none, every process compiles
    torch for itself: 14 s to import the trainer, 11 s to import the compiler."""
    where = sysconfig.get_paths()["purelib"]
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", where]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def side_by_side(folder: Path) -> dict[str, str]:
    """Settings under which kernels of several processes run at the same time (NVIDIA's MPS) instead
    of taking turns; nothing where it cannot be had."""
    settings = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps"),
    }
    (folder / "mps").mkdir(exist_ok=True)
    trial = "import torch; x = torch.ones(64, 64, device='cuda'); assert (x @ x).sum() > 0"
    around = {"env": {**os.environ, **settings}, "check": True, "timeout": 60}
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], **around)
        subprocess.run([sys.executable, "-c", trial], **around)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"processes take turns on the GPU: {error}", flush=True)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit", **around)
        return {}
    print("processes share the GPU (MPS)", flush=True)
    return settings


def incoming(folder: Path, deadline: float):
    """The files of the stream, each as soon as its last byte is here."""
    inbox = folder / "inbox"
    while not (inbox / MANIFEST).exists():
        _pause(deadline)
    number, data = 1, b""
    for entry in json.loads((inbox / MANIFEST).read_text()):
        content = folder / f"{entry['name']}.{entry['kind']}"
        with open(content, "wb") as file:
            left = entry["bytes"]
            while left:
                if not data:
                    while not (inbox / f"{number:03d}.bin").exists():
                        _pause(deadline)
                    data = (inbox / f"{number:03d}.bin").read_bytes()
                    number += 1
                file.write(data[:left])
                left, data = left - len(data[:left]), data[left:]
        yield entry["name"], entry["kind"], content


def _pause(deadline: float) -> None:
    if time.time() > deadline:
        raise SystemExit("out of time while parcels were missing")
    time.sleep(0.2)


def environment(folder: Path) -> dict[str, str]:
    paths = [str(folder / "code" / "src"), str(folder / "packages")]
    return {
        **os.environ,
        "PYTHONPATH": ":".join([*paths, os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
        # the workers compile side by side on few cores, mostly from one another's cache
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }


def start_workers(options: argparse.Namespace, deadline: float) -> list[subprocess.Popen]:
    folder: Path = options.folder
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    study = str(folder / options.study) if options.study.endswith(".yaml") else options.study
    command = [sys.executable, "-m", "vocagnolm.study.worker", study]
    command += ["--folder", str(folder / "out"), "--materials", str(folder / "materials")]
    command += ["--deadline", str(deadline)]
    for override in options.overrides:
        command += ["--set", override]
    processes = []
    for number in range(options.workers):
        log = open(logs / f"worker{number}.log", "w")  # noqa: SIM115
        processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment(folder)))
    (folder / "pids.json").write_text(json.dumps([os.getpid(), *(p.pid for p in processes)]))
    return processes


def stop(options: argparse.Namespace) -> None:
    """End `serve` and its workers, by their own numbers."""
    for number in json.loads((options.folder / "pids.json").read_text()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGTERM)
    if options.forget:
        shutil.rmtree(options.folder / "out", ignore_errors=True)


# ---- look, and bring home ----


def status(options: argparse.Namespace) -> None:
    out = options.folder / "out"
    time.sleep(options.after)
    for path in sorted((out / "times").glob("*.json"), key=lambda p: p.stat().st_mtime):
        record = json.loads(path.read_text())
        print(f"{record['task']:24s} {record['seconds']:7.1f} s{_rates(out, record['task'])}")
    for path in (out / "failed").glob("*.txt"):
        print(f"FAILED {path.stem}: {path.read_text().strip().splitlines()[-1][:300]}")
    for path in sorted((options.folder / "logs").glob("*.log")):
        lines = path.read_text(errors="replace").strip().splitlines()
        print(f"{path.name}: {' | '.join(line[:160] for line in lines[-2:])}")
    if options.out is not None:
        collect(options)


def _rates(out: Path, task: str) -> str:
    for kind in ("runs", "tuning"):
        folder = out / kind / (task if kind == "runs" else task.removeprefix("tune-"))
        if (folder / "evaluation.json").exists() and (folder / "metrics.jsonl").exists():
            found = json.loads((folder / "evaluation.json").read_text())
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            rates = sorted(json.loads(line)["tokens_per_second"] for line in lines)
            bits = " ".join(f"{k} {v:.4f}" for k, v in found["held_out"].items())
            return (
                f"  train {found.get('train_seconds', 0):5.1f} s, "
                f"{rates[len(rates) // 2] / 1000:.0f} k tokens/s, "
                f"evaluate {found['evaluate_seconds']:5.1f} s, {bits}"
            )
    return ""


def collect(options: argparse.Namespace) -> None:
    """All results, without models and blocks; stores where they are asked for."""
    out = options.folder / "out"
    options.out.mkdir(parents=True, exist_ok=True)
    for store in options.stores:
        _bring_store(out / "stores" / store, options.out)
    temporary = options.out / ".results.tmp"
    with tarfile.open(temporary, "w:gz", compresslevel=4) as archive:
        for pattern in (
            "runs/*/*.json*",
            "runs/*/recipe.yaml",
            "tuning/*/evaluation.json",
            "start/*.json*",
            "stores/*.json",
            "stores/*/manifest.json",
            "blocks/*/manifest.json",
            "times/*",
            "failed/*",
        ):
            for path in sorted(out.glob(pattern)):
                archive.add(path, str(path.relative_to(out)))
        for path in sorted((options.folder / "logs").glob("*")):
            archive.add(path, f"logs/{path.name}")
    temporary.rename(options.out / "results.tar.gz")  # whole, whenever the command is ended
    size = (options.out / "results.tar.gz").stat().st_size
    print(f"results.tar.gz: {size / 1e6:.1f} MB")


def _bring_store(store: Path, out: Path) -> None:
    """As STORE.tar.01, .02, ...: `cat STORE.tar.* | tar x`."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(store, store.name)
    content = data.getvalue()
    for number, at in enumerate(range(0, len(content), PART_BYTES), 1):
        (out / f"{store.name}.tar.{number:02d}").write_bytes(content[at : at + PART_BYTES])


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)

    def command(name: str, function) -> argparse.ArgumentParser:
        added = commands.add_parser(name)
        added.set_defaults(function=function)
        added.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "miniature")
        return added

    packing = command("pack", pack)
    packing.add_argument("out", type=Path)
    packing.add_argument("--texts", type=Path, required=True)
    packing.add_argument("--models", type=Path)
    packing.add_argument("--packages", type=Path, nargs="*", default=[])
    packing.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    packing.add_argument("--finished", type=Path, help="a study's folder with finished runs")
    packing.add_argument("--parcel-bytes", type=int, default=PARCEL_BYTES)
    taking = command("take", take)
    taking.add_argument("parcel", type=Path)
    serving = command("serve", serve)
    serving.add_argument("--minutes", type=float, default=15.0)
    serving.add_argument("--workers", type=int, default=4)
    serving.add_argument("--study", default="miniature")
    serving.add_argument("--set", action="append", default=[], dest="overrides")
    stopping = command("stop", stop)
    stopping.add_argument("--forget", action="store_true", help="remove all results")
    looking = command("status", status)
    looking.add_argument("--after", type=float, default=0.0)
    looking.add_argument("--out", type=Path)
    looking.add_argument("--stores", nargs="*", default=[])
    collecting = command("collect", collect)
    collecting.add_argument("out", type=Path)
    collecting.add_argument("--stores", nargs="*", default=[])
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
