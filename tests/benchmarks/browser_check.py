"""Pages of launch/page.py in a real browser, as a reader sees them.

    python tests/benchmarks/browser_check.py OUT PAGE [PAGE ...]     pages that are there
    python tests/benchmarks/browser_check.py OUT --large             one of 192 MB of samples, made first

Needs Debian's chromium and `pip install playwright`; not part of the tests, as chromium is 300 MB. Each
page is opened at 1400 and at 420 pixels, light and dark. It prints the seconds until the first samples
stand there, and every fault: a message of the console, a request to anything but a file, a page wider
than the window, a script of a sample that ran. Further it colours tokens, reloads the address, clicks
on a curve, and shows a row over all steps. Screenshots are in OUT: look at them. Exit code 1: there was
a fault.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = "/usr/bin/chromium"
# As if a sample had got into the page by another way: the policy of the page must stop it.
INTRUDER = """async () => {
  window.ran = 0;
  document.body.insertAdjacentHTML("beforeend", '<img src="x" onerror="window.ran = 1">');
  await new Promise((done) => setTimeout(done, 300));
  return window.ran;
}"""
FIRST = "#groups .group, #groups p"


def write_large_run(folder: Path, mib: int = 192) -> None:
    """46 files of 2,000 samples each, of eight to a prompt, with as many words as it takes."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(3000)]
    (folder / "samples").mkdir(parents=True)
    steps = range(0, 230, 5)
    length = mib * 2**20 // (len(steps) * 2000)  # of a line
    with open(folder / "metrics.jsonl", "w") as metrics:
        for step in steps:
            with open(folder / "samples" / f"step-{step:06d}.jsonl", "w") as file:
                for i in range(2000):
                    file.write(json.dumps(large_sample(i, length, words, rng)) + "\n")
            record = {"step": step, "rollout/reward": rng.random(), "train/kl": rng.random()}
            metrics.write(json.dumps(record) + "\n")


def large_sample(i: int, length: int, words: list[str], rng: random.Random) -> dict:
    prompt = f"prompt {i // 8}: " + " ".join(words[i // 8 : i // 8 + 60])
    response = ""
    while len(response) < length - 2 * len(prompt) - 300:
        response += words[int(len(words) * rng.random() ** 3)] + " "  # some are frequent
    return {
        "source": f"rows.jsonl:{i // 8}",
        "sample": i % 8,
        "prompt": prompt,
        "question": prompt,
        "images": [],
        "response": response,
        "reference": "7",
        "label": "large",
        "response_length": len(response.split()),
        "truncated": False,
        "reward": rng.random(),
        "advantage": rng.random() - 0.5,
    }


class Reader:
    """A browser's view of a page, and the faults that it has seen."""

    def __init__(self, browser, address: str, out: Path, name: str, width: int, scheme: str):
        self.stem, self.out = f"{name}-{width}-{scheme}", out
        self.faults: list[str] = []
        size = {"width": width, "height": 1000}
        self.page = browser.new_page(viewport=size, color_scheme=scheme)
        self.page.on("console", lambda line: self.note(line.text))
        self.page.on("pageerror", lambda error: self.note(f"error {error}"))
        self.page.on("dialog", lambda dialog: (self.note("a dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.check_request(request.url))
        self.page.set_default_timeout(120_000)
        started = time.time()
        self.page.goto(address)
        self.page.wait_for_selector(FIRST)
        self.seconds = time.time() - started

    def note(self, text: str) -> None:
        # a picture that has gone is said on the page
        if "ERR_FILE_NOT_FOUND" not in text:
            self.faults.append(text)

    def check_request(self, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            self.faults.append(f"asked for {url}")

    def shoot(self, name: str = "") -> None:
        self.page.screenshot(path=self.out / f"{self.stem}{name}.png")

    def look(self) -> None:
        """The top of the page and its samples."""
        if self.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            self.faults.append("wider than the window")
        self.shoot()
        self.page.evaluate("document.getElementById('samples').scrollIntoView()")
        time.sleep(0.5)
        self.shoot("-samples")

    def use(self) -> str:
        """What a reader does; returns how long a row over all steps took."""
        page = self.page
        numbers = page.eval_on_selector_all("#colour option", "all => all.map((one) => one.value)")
        for name in ("change of value", "advantages"):
            if name in numbers:
                page.select_option("#colour", name)
                time.sleep(0.5)
                page.evaluate("document.getElementById('samples').scrollIntoView()")
                self.shoot(f"-{name.replace(' ', '-')}")
        step = page.inner_text("#at")
        page.reload()
        page.wait_for_selector(FIRST)
        if page.inner_text("#at") != step:
            self.faults.append(f"a reload of step {step} shows {page.inner_text('#at')}")
        if page.query_selector("#charts svg"):
            page.click("#charts svg", position={"x": 60, "y": 60})
            time.sleep(0.5)
        if not page.query_selector("#groups button"):
            return ""
        started = time.time()
        page.click("#groups button")
        page.wait_for_selector("dialog table")
        seconds = time.time() - started
        self.shoot("-row")
        return f", a row over all steps {seconds:.2f} s"

    def close(self) -> None:
        before = len(self.faults)
        if self.page.evaluate(INTRUDER):
            self.faults.append("a script of a sample ran")
        del self.faults[before:-1]  # that the policy refused it is no fault
        self.faults = [one for one in self.faults if "Content Security Policy" not in one]
        self.page.close()


def check(browser, path: Path, out: Path) -> int:
    faults = 0
    for width in (1400, 420):
        for scheme in ("light", "dark"):
            reader = Reader(browser, path.resolve().as_uri(), out, path.stem, width, scheme)
            reader.look()
            used = reader.use() if scheme == "light" else ""
            reader.close()
            told = f"{reader.stem}: first samples {reader.seconds:.2f} s{used}"
            print(told, *reader.faults or ["no fault"], sep="; ", flush=True)
            faults += len(reader.faults)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("pages", type=Path, nargs="*")
    parser.add_argument("--large", action="store_true")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    args.out.mkdir(parents=True, exist_ok=True)
    if args.large:
        if not (args.out / "large").exists():
            write_large_run(args.out / "large")
        started = time.time()
        command = ["launch/page.py", args.out / "large", "--out", args.out / "large.html"]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
        print(f"written in {time.time() - started:.1f} s")
        args.pages.append(args.out / "large.html")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        faults = sum(check(browser, path, args.out) for path in args.pages)
        browser.close()
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
