"""Pictures of a report's HTML page at the widths of a desktop and of a phone, by a headless Chromium.

    python -m benchmarks.screenshot --browser chromium                 # docs/report_*.png, of a Llama-3-8B on a B200
    python -m benchmarks.screenshot --browser chromium --page report.html --out FOLDER [--dark]

Prints the widths of page and window: a page that is wider than its window would have to be scrolled sideways, and the
exit status is then 1. Needs a Chromium or Chrome, whose DevTools protocol it speaks through two pipes.
"""

import argparse
import base64
import contextlib
import fcntl
import io
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Width and largest height in pixels, and pixels of the picture for one of the page.
DESKTOP, PHONE = ("desktop", 1280, 800, 1), ("phone", 390, 1150, 1.2)
_LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip


class Browser:
    """A headless browser with one blank page. Close it by leaving its `with` block."""

    def __init__(self, command: str):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, commands = os.pipe()
        answers, writes = os.pipe()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
                 f"--user-data-dir={self.folder.name}", "about:blank")  # fmt: skip

        def as_3_and_4() -> None:  # the descriptors from which the browser reads, and to which it writes
            for end, number in [(fcntl.fcntl(each, fcntl.F_DUPFD, 10), 3 + place)
                                for place, each in enumerate((reads, writes))]:  # fmt: skip
                os.dup2(end, number)

        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            [command, *flags], preexec_fn=as_3_and_4, close_fds=False, stdout=quiet, stderr=quiet
        )
        os.close(reads)
        os.close(writes)
        self.commands, self.answers = os.fdopen(commands, "wb"), self._messages(answers)
        self.numbers = itertools.count(1)
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self.call("Page.enable")

    session: str | None = None

    @staticmethod
    def _messages(descriptor: int) -> Iterator[dict[str, Any]]:
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            waiting = b""
            while data := file.read(1 << 16):
                *whole, waiting = (waiting + data).split(b"\0")
                yield from map(json.loads, whole)

    def call(self, method: str, **parameters: Any) -> Any:
        """The answer to a command of the DevTools protocol. Raises RuntimeError for an error."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        self.commands.write(json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode())
        self.commands.write(b"\0")
        self.commands.flush()
        answer = next(each for each in self.answers if each.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, page: Path, width: int, height: int, scale: float, dark: bool) -> None:
        """Show a page in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=width < 600)  # fmt: skip
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.resolve().as_uri())
        next(each for each in self.answers if each.get("method") == "Page.loadEventFired")

    def value(self, script: str) -> Any:
        """The value of a JavaScript expression on the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def picture(self, width: int, height: int) -> bytes:
        """A PNG file of the page's upper part."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: Any) -> None:
        self.commands.close()
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


def take(browser: Browser, page: Path, name: str, width: int, height: int, scale: float, *, dark: bool, out: Path,
         whole: bool = False) -> bool:  # fmt: skip
    """Write `out`/report_NAME.png. Returns whether the page is no wider than the window."""
    browser.open(page, width, height, scale, dark)
    wide, tall = (browser.value(f"document.documentElement.scroll{side}") for side in ("Width", "Height"))
    file = out / f"report_{name}{'_dark' if dark else ''}.png"
    file.write_bytes(browser.picture(width, tall if whole else min(tall, height)))
    print(f"{file}: {file.stat().st_size // 1024} KiB; page {wide} x {tall}, window {width} wide")
    return wide <= width


def _llama(folder: Path) -> Path:
    """The page of `explain` for the example in docs/report.md."""
    from fp4compile.cli.main import main as command

    config, page = folder / "config.json", folder / "report.html"
    config.write_text(json.dumps(_LLAMA_3_8B))
    with contextlib.redirect_stdout(io.StringIO()):
        command(["explain", str(config), "--recipe", "nvfp4", "--gpu", "B200", "--tokens", "4096", "--html", str(page)])
    return page


def main() -> int:
    """Take the pictures. Returns 1 where the page is wider than a window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", default="chromium", help="its name or path (chromium)")
    parser.add_argument("--page", type=Path, help="an HTML file; by default, a Llama-3-8B's is made")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="a folder (docs)")
    parser.add_argument("--dark", action="store_true", help="for a reader who prefers dark pages")
    parser.add_argument("--whole", action="store_true", help="the whole page, not only what the window shows first")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser(args.browser) as browser:
        page = args.page or _llama(Path(folder))
        fits = [take(browser, page, *size, dark=args.dark, out=args.out, whole=args.whole) for size in (DESKTOP, PHONE)]
    return 0 if all(fits) else 1


if __name__ == "__main__":
    raise SystemExit(main())
