"""Send a tensor to another host.

    python send_tensor.py receive                  # prints a line
    python send_tensor.py send 'TCPX_KEY=... HOST:PORT'

Works with torch tensors on GPUs or not (``pip install torch``); without torch it sends a numpy array.
"""

import sys
import time

import tcpx

try:
    import torch
except ImportError:
    torch = None

GPU = 0 if torch is not None and torch.cuda.is_available() else None
ELEMENTS = 1 << 20


def tensor(fill: float):
    if torch is not None:
        device = "cpu" if GPU is None else f"cuda:{GPU}"
        return torch.full((ELEMENTS,), fill, dtype=torch.float32, device=device)
    import numpy

    return numpy.full(ELEMENTS, fill, dtype=numpy.float32)


def bar(what: str):
    """A bar on standard error: tqdm's where it is installed, else one of our own."""
    try:
        from tqdm import tqdm

        shown = tqdm(desc=what, unit="B", unit_scale=True)

        def progress(done: int, total: int) -> None:
            shown.total = total or None
            shown.update(done - shown.n)
            if total and done == total:
                shown.close()

    except ImportError:
        started = time.monotonic()

        def progress(done: int, total: int) -> None:
            part = done / total if total else 0.0
            rate = done / max(time.monotonic() - started, 1e-9) / 1e9
            line = f"\r{what} [{'#' * int(part * 40):<40}] {part:4.0%} {rate:6.2f} GB/s"
            print(line, end="\n" if total and done == total else "", file=sys.stderr, flush=True)

    return progress


def receive() -> None:
    with tcpx.Endpoint(":0", gpu=GPU) as server:
        print(server.pairing(), flush=True)
        with server.accept().wait() as connection:
            destination = tensor(0.0)
            report = connection.recv(destination, tag=7).wait(progress=bar("receiving"))
            print(f"{report.nbytes} bytes in {report.seconds * 1e3:.1f} ms, "
                  f"first element {float(destination[0])}")


def send(line: str) -> None:
    with tcpx.connect(line, gpu=GPU) as connection:
        transfer = connection.send(tensor(42.0), tag=7, level="verified")
        report = transfer.wait(progress=bar("sending"))
        print(f"{report.nbytes} bytes {report.level}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["receive"]:
            receive()
        case ["send", line]:
            send(line)
        case _:
            sys.exit(__doc__)
