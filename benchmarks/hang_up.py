"""How soon the blocks of a client that hangs up are free again, on a real model behind the real server.

    python benchmarks/hang_up.py [--model smollm2-135m] [--rounds 5]

A stream is cut after its first tokens, once alone and once while another client's long prompt is computed; from then on
`/cache` is asked every 10 ms until that request holds no block. Seconds, the longest last.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server(model: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kvist", "serve", model, "--port", str(port), "--memory", "512MiB"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{base}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield base
    finally:
        process.terminate()
        process.wait(30)


def ask(base: str, prompt: list[int], max_tokens: int) -> object:
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0}
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)


def holders(base: str) -> set[str]:
    """The requests that hold blocks."""
    with urllib.request.urlopen(f"{base}/cache", timeout=30) as answer:
        return {name for group in json.load(answer)["groups"] for _, _, name in group["held_by"]}


def seconds_until_free(base: str, number: int, *, beside: bool) -> float:
    """Hang up in the middle of an answer; `beside` another request whose prompt is being computed."""
    stream = ask(base, [100 + number, *range(1000, 1200)], 2000)
    for _ in range(8):
        stream.readline()
    mine = holders(base)
    assert len(mine) == 1, mine
    other = None
    if beside:
        prompt = [(7 * i + 31 * number) % 40_000 + 100 for i in range(7900)]
        other = threading.Thread(target=lambda: ask(base, prompt, 1).read())
        other.start()
        time.sleep(0.3)
    stream.close()
    began = time.perf_counter()
    while mine & holders(base):
        time.sleep(0.01)
    took = time.perf_counter() - began
    if other is not None:
        other.join()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with server(args.model) as base:
        for title, beside in (("alone", False), ("beside a prompt of 7,900 tokens", True)):
            times = sorted(seconds_until_free(base, number, beside=beside) for number in range(args.rounds))
            print(f"{title}: {' '.join(f'{took:.3f}' for took in times)}")


if __name__ == "__main__":
    main()
