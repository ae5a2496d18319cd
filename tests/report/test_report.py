"""The report page: complete, partial, torn and hostile run directories; size, well-formedness, self-containment."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nonet.report import scale, trajectories, write
from nonet.report.page import HERE
from nonet.types import UserError

sys.path.insert(0, str(Path(__file__).parent))
from fake_run import DOMAINS, EVIL, write_run

LIMIT = 3_000_000
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags must balance; keeps the text of script elements and the visible text of the rest."""

    def __init__(self, source: str):
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.ids: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        assert len(named) == len(attrs), f"attribute named twice in {tag}: {attrs}"
        assert not any(name.startswith("on") for name in named), f"inline handler in {tag}"
        if identity := named.get("id"):
            self.ids.append(identity)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"path", "circle"}, f"self-closing {tag}"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.text += data


def check(run: Path) -> Page:
    """Write the report and hold it to everything that is true of every report."""
    file = write(run)
    assert file == run / "report.html"
    assert not list(run.glob(".*partial"))
    data = file.read_bytes()
    assert len(data) < LIMIT
    source = data.decode("ascii")
    assert not re.search(r"""(?:src|href|action|data|poster)\s*=\s*["']?\s*(?:[a-z]+:|//)""", source, re.I)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", source)
    assert "Content-Security-Policy" in source
    page = Page(source)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"""\b(?:d|x|y|cx|cy|viewBox)="[^"]*(?:nan|inf)""", source)
    assert len(page.scripts) in (0, 2)
    return page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first")


def test_a_complete_run_has_every_section(run: Path) -> None:
    page = check(run)
    for identity in ("headline", "cold", "rl", "lengths", "versions", "reader", "draft", "samples", "stages"):
        assert identity in page.ids
    assert "All stages have ended." in page.text
    assert 'class="missing"' not in (run / "report.html").read_text().replace('<noscript><p class="missing"', "")
    for figure in ("Loss, nats per token", "Reward by domain", "Entropy", "Dead-group share", "Tokens by age"):
        assert figure in page.text


def test_the_headline_shows_recorded_numbers(run: Path) -> None:
    page = check(run)
    gains = [json.loads(x) for x in (run / "events.jsonl").read_text().splitlines() if '"kind": "gain"' in x]
    for gain in gains:
        assert scale.signed(gain["gain"]) in page.text
        assert f"[{scale.signed(gain['low'])}, {scale.signed(gain['high'])}]" in page.text
    assert (
        "6 comparisons of held-out reward: "
        "the 95% interval of the gain is above zero in 4, below zero in 0, across zero in 2." in page.text
    )


def test_the_drafts_acceptance_is_shown_as_recorded(run: Path) -> None:
    page = check(run)
    for words in ("3.80", "[3.60, 4.00]", "1.52×", "[1.40, 1.63]", "Acceptance by position", "tuned, sampled"):
        assert words in page.text


def test_a_run_without_a_draft_has_no_section_for_it(run: Path, tmp_path: Path) -> None:
    lines = [x for x in (run / "events.jsonl").read_text().splitlines() if "draft" not in x]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert "draft" not in check(tmp_path).ids
    (tmp_path / "events.jsonl").write_text(json.dumps({"kind": "stage", "name": "draft", "status": "start"}) + "\n")
    assert "No draft: the stage “draft” has started and has not recorded any yet." in check(tmp_path).text


@pytest.mark.parametrize(
    "torn", [{"tuned": 3}, {"factor": "much"}, {"tuned": {"positions": ["x", None, 0.5], "length": 2}}]
)
def test_a_torn_measurement_is_shown_as_far_as_it_goes(torn: dict[str, Any], tmp_path: Path) -> None:
    event = {"kind": "draft_measured", "domain": "all", "mode": "sampled", **torn}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert "draft" in check(tmp_path).ids


def test_same_directory_same_page(run: Path) -> None:
    first = write(run).read_bytes()
    assert write(run).read_bytes() == first


def test_paths_of_this_machine_stay_out(run: Path) -> None:
    check(run)
    source = (run / "report.html").read_text()
    assert "/home/someone" not in source
    assert str(run) not in source
    assert "/first" in source


def test_a_directory_that_does_not_exist_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        write(tmp_path / "absent")


def test_an_empty_directory_says_what_is_missing(tmp_path: Path) -> None:
    page = check(tmp_path)
    assert "the stage “rl” has not started" in page.text
    assert "resolved.json is absent" in page.text
    assert page.scripts == []


@pytest.mark.parametrize("share", [0.002, 0.01, 0.1, 0.2, 0.3, 0.35, 0.5, 0.9, 0.97])
def test_a_run_still_going_on(run: Path, tmp_path: Path, share: float) -> None:
    """Events cut anywhere (also inside a line), and only the trajectories of the steps so far."""
    data = (run / "events.jsonl").read_bytes()
    part = data[: int(len(data) * share)]
    (tmp_path / "events.jsonl").write_bytes(part)
    (tmp_path / "resolved.json").write_bytes((run / "resolved.json").read_bytes()[: int(400 * share)])
    (tmp_path / "trajectories").mkdir()
    for file in sorted((run / "trajectories").glob("step-*"))[: part.count(b'"rl_step"')]:
        (tmp_path / "trajectories" / file.name).write_bytes(file.read_bytes()[:-20])
    page = check(tmp_path)
    assert "This run is partial" in page.text
    assert ("1 line(s) of events.jsonl" in page.text) == (not part.endswith(b"\n"))


def test_files_of_garbage(tmp_path: Path) -> None:
    noise = random.Random(3).randbytes(4000)
    deep = b"[" * 100_000 + b"\n" + b'{"kind": "note", "text": ' + b'{"a":' * 900 + b"1" + b"}" * 901 + b"\n"
    for name in ("events.jsonl", "resolved.json"):
        (tmp_path / name).write_bytes(noise + b"\n" + deep + b"\n[]\n3\nnull\n{}\n")
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step-000001.jsonl").write_bytes(noise + deep)
    (tmp_path / "trajectories" / "step-x.jsonl").write_text('{"segments": [{"author": 3, "pieces": [1, null, {}]}]}\n')
    (tmp_path / "trajectories" / "odd.jsonl").mkdir()
    page = check(tmp_path)
    assert "could not be read" in page.text


ODD: list[Any] = [None, "x", True, [], {}, math.nan, math.inf, -1, 0, 10**400, 1e308, -1e300, 1e-320, "</b>", [[]]]


@pytest.mark.parametrize("seed", range(25))
def test_fields_of_the_wrong_kind(tmp_path: Path, seed: int) -> None:
    """Any field of any record may be absent or nonsense."""
    rng = random.Random(seed)
    write_run(tmp_path, cold=12, steps=6, per_step=4)
    for file in (tmp_path / "events.jsonl", *(tmp_path / "trajectories").iterdir(), tmp_path / "resolved.json"):
        rows = [json.loads(x) for x in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(_broken(rng, row)) + "\n" for row in rows))
    check(tmp_path)


def _broken(rng: random.Random, value: Any) -> Any:
    if rng.random() < 0.06:
        return rng.choice(ODD)
    if isinstance(value, dict):
        return {k: _broken(rng, v) for k, v in value.items() if rng.random() > 0.04}
    if isinstance(value, list):
        return [_broken(rng, v) for v in value]
    return value


def test_hostile_pieces_stay_text(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20, evil=True)
    page = check(tmp_path)
    data = json.loads(page.scripts[0])
    seen = {piece for t in data for s in t["s"] for piece in s[2]}
    assert set(EVIL) <= seen
    assert page.scripts[1] == (HERE / "report.js").read_text()
    assert "<script>alert(1)" in page.text  # as visible text of a sample; `check` counted the elements
    assert "⟨202E⟩" in page.text
    assert "\u202e" not in page.text


def test_a_large_run_stays_small(tmp_path: Path) -> None:
    write_run(tmp_path, cold=3000, steps=3000, per_step=1)
    with (tmp_path / "events.jsonl").open("a") as f:
        for i in range(500):
            f.write(json.dumps({"kind": "sample", "prompt": "<" * 9000, "text": "😀" * 9000, "t": i}) + "\n")
            f.write(json.dumps({"kind": "note", "text": "&" * 9000}) + "\n")
            f.write(json.dumps({"kind": "eval", "stage": "eval-rl", "domain": f"<d{i}>" * 90, "reward": 0.5}) + "\n")
            f.write(json.dumps({"kind": "gain", "domain": f"<d{i}>" * 90, "gain": 0.5}) + "\n")
            f.write(json.dumps({"kind": "stage", "name": f"<{i}>" * 90, "status": "start"}) + "\n")
    segment = {"author": "policy", "version": 1, "pieces": ["<" * 900] * 5000, "logprobs": [-0.5] * 5000}
    wide = {"id": "wide", "task_id": "<" * 999, "domain": "<" * 999, "reward": 1.0, "segments": [segment] * 3}
    with (tmp_path / "trajectories" / "step-000001.jsonl").open("a") as f:
        for _ in range(10):
            f.write(json.dumps(wide) + "\n")
    (tmp_path / "resolved.json").write_text(json.dumps({f"<k{i}>": "\U0001f600" * 900 for i in range(999)}))
    page = check(tmp_path)
    assert "more characters are in resolved.json" in page.text
    assert "across zero in 2, not recorded in 500." in page.text


def test_the_choice_covers_what_there_is(run: Path) -> None:
    found = trajectories.scan(run)
    chosen = trajectories.choose(found)
    assert len(chosen) == len(set(chosen)) == trajectories.SHOWN
    assert {s.domain for s in chosen} == set(DOMAINS)
    assert {s.versions for s in chosen} >= {1, 2, 3}
    assert max(s.versions for s in chosen) == max(s.versions for s in found.items)
    assert {s.reward for s in chosen} >= {0.0, 0.25, 0.5, 1.0}
    first, last = found.ends()
    steps = {s.step for s in chosen}
    assert steps & set(first) and steps & set(last) and None in steps
    assert chosen == trajectories.choose(trajectories.scan(run))


def test_too_much_to_read_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "SCAN_BYTES", 200_000)
    page = check(run)
    assert re.search(r"are from \d+ of 122 trajectory files", page.text)
    found = trajectories.scan(run)
    assert 2 <= found.files_read < 122


def test_the_room_loads_no_other_room() -> None:
    """Importing and using the report never brings in torch, matplotlib or another room."""
    code = "import sys, nonet.report; print(*sorted(m for m in sys.modules))"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "matplotlib", "numpy"} & set(names)
    rooms = {n.split(".")[1] for n in names if n.startswith("nonet.")}
    assert rooms <= {"report", "run", "types", "config"}


@pytest.mark.parametrize("low,high", [(0, 1), (-3e-4, 5e-4), (1e-30, 2e-30), (0.98, 1.01), (-1e29, 1e30), (5, 905)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = scale.ticks(low, high, 4)
    assert 2 <= len(found) <= 10
    assert all(low - (high - low) * 1e-6 <= t <= high + (high - low) * 1e-6 for t in found)


@pytest.mark.parametrize(
    "value,shown", [(0, "0"), (0.25, "0.25"), (1500, "1.5k"), (-2e6, "−2M"), (3e-5, "3e−5"), (-2.5e-4, "−2.5e−4")]
)
def test_short_numbers(value: float, shown: str) -> None:
    assert scale.short(value) == shown


def test_thinning_keeps_spikes() -> None:
    points = [(float(i), 0.0) for i in range(5000)]
    points[1234] = (1234.0, 9.0)
    assert (1234.0, 9.0) in scale.thin(points)
    assert len(scale.thin(points)) <= scale.POINTS


def test_text_colours_have_contrast() -> None:
    """WCAG AA (4.5 to 1) for text on the page and on raised boxes, light and dark."""
    css = (HERE / "report.css").read_text()
    for scheme in css.split("@media (prefers-color-scheme: dark)")[:2]:
        colours = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6});", scheme.split("* {")[0]))
        for front in ("ink", "soft", "accent"):
            for back in ("page", "raised", "warn", "tool"):
                if front != "accent" or back in ("page", "raised"):
                    assert _contrast(colours[front], colours[back]) >= 4.5, (front, back)


def _contrast(a: str, b: str) -> float:
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = list(_linear(colour))
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def _linear(colour: str) -> Iterator[float]:
    for i in (1, 3, 5):
        c = int(colour[i : i + 2], 16) / 255
        yield c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
