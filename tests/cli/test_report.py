"""`hybrid-engine report`: the page that it writes, seen by a browser where there is one, and what it refuses."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hybrid_engine.cli import cli
from hybrid_engine.rlhf import reports
from hybrid_engine.rlhf.runs.run_folder import (
    PromptAnswers,
    TeacherFigures,
    write_answers,
    write_teacher_figures,
)
from tests.support.browser import Browser, find_browser
from tests.support.paths import ROOT

HOSTILE = "</script><img src=x onerror=alert(1)>{{script}}<!--"
PHONE, DESK = (390, 800), (1200, 900)


def write_run(folder, score):
    """A run of five steps with evaluations after 0, 2 and 4 of them, whose texts want to be markup."""
    folder.mkdir()
    steps = [
        {"step": step, "score": score * step, "loss": float("nan") if step == 1 else 1 / (step + 1)}
        | ({"held_out": score} if step % 2 else {})
        | {"e2e_seconds": 2.0, "generate_seconds": 1.5, "others_seconds": 0.5, "peak_kv_bytes": 2**20 * (step + 1)}
        for step in range(5)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (folder / "config.yaml").write_text(f"out: runs/x\nscore_weight: {score}\nsteps: 5\n")
    (folder / "result.json").write_text(json.dumps({"after": {"score": score}}))
    (folder / "samples.json").write_text(json.dumps([{"prompt": HOSTILE, "before": "a", "after": "b"}]))
    for step in (0, 2, 4):
        answers = {"responses": [f"{HOSTILE} answer {step}", "7"], "rewards": [score * step, None], "lengths": [9, 1]}
        watched = {"tokens": [["an", "swer"], ["7"]], "logprobs": [[-1.0 - step, -2.0], [-0.5 + step / 10]]}
        prompts = [HOSTILE, "x" * 300]
        write_answers(folder, step, [PromptAnswers(prompt=prompt, **answers, **watched) for prompt in prompts])
    for step in (1, 4):
        means = {"agreement": 0.25 * step, "divergence": score, "entropy": 1.0, "teacher_entropy": 2.0}
        positions = [{"first": 0, "last": 0, "tokens": 3, **means}, {"first": 1, "last": 4, "tokens": 9, **means}]
        token = {"divergence": 3.5, "before": HOSTILE, "token": "\n", "top": HOSTILE, "teacher_top": f"step {step}"}
        write_teacher_figures(folder, step, TeacherFigures(positions, [token]))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, score in (("one", 0.5), (f"two-{'long' * 20}", 0.25)):
        write_run(tmp_path / name, score)
    return [path.name for path in sorted(tmp_path.iterdir())]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium on PATH")
    with Browser(path, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_the_page_is_in_the_first_runs_folder_and_a_report_alone_is_replaced(runs, capsys):
    assert cli.main(["report", *runs]) == 0 and cli.main(["report", *runs]) == 0
    assert capsys.readouterr().out == f"{runs[0]}/report.html\n" * 2
    Path("mine.html").write_text("mine")
    assert cli.main(["report", runs[0], "--out", "mine.html"]) == 2
    assert "'mine.html' is a file that `report` did not write" in capsys.readouterr().err
    assert Path("mine.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nothing", "'nothing' is not a folder"),
        ("empty", "'empty' has no metrics.jsonl"),
        ("one --out empty", "'empty' is a folder; give a file in it"),
        ("one --out none/page.html", "cannot be written: No such file or directory"),
        ("one --prompts -1", "--prompts=-1 must be at least 0"),
    ],
)
def test_what_cannot_be_shown_or_written_is_named(arguments, message, runs, capsys):
    Path("empty").mkdir()
    assert cli.main(["report", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_page_needs_no_network_and_no_text_of_a_run_is_markup(runs):
    assert cli.main(["report", *runs, "--out", "page.html"]) == 0
    text = Path("page.html").read_text()
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|url\(", text)
    assert text.count("</script") == 2 and "<img" not in text and "onerror" in text
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    first = json.loads(data)["runs"][0]
    assert first["samples"][0]["prompt"] == HOSTILE and first["figures"]["loss"][1] == "nan"


def test_our_own_script_cannot_end_its_element():
    assert "</script" not in "".join(map(reports.read_asset, reports.SCRIPTS))


def test_fewer_prompts_make_a_smaller_page(runs):
    run = reports.read_run(runs[0])
    assert {answer["prompt"] for answer in reports.run_content(run, 1)["answers"]} == {HOSTILE}
    assert reports.run_content(run, 0)["answers"] == []


def value_of(browser, figure):
    return browser.evaluate(f"document.querySelector('[data-figure={figure}] .values').textContent")


def test_the_slider_moves_values_answers_and_histograms_of_all_runs_by_mouse_and_key(runs, browser):
    cli.main(["report", *runs, "--out", "page.html"])
    browser.messages.clear()
    browser.open(Path("page.html"), *DESK)
    assert browser.evaluate("document.title") == ", ".join(runs)
    assert value_of(browser, "score") == "21"
    assert "answer 4" in browser.evaluate("document.getElementById('answers').innerText")
    assert browser.evaluate("document.querySelector('.token.down').title") == "an: -1 → -5"
    browser.evaluate("document.querySelector('#answers details details').open = true")
    browser.evaluate("document.getElementById('step').focus()")
    browser.press("Home")
    browser.press("ArrowRight")
    assert browser.evaluate("document.getElementById('step-value').textContent") == "1"
    assert value_of(browser, "score") == "0.50.25" and value_of(browser, "loss") == "nannan"
    assert "answer 0" in browser.evaluate("document.getElementById('answers').innerText")
    assert browser.evaluate("document.querySelectorAll('.token.up, .token.down').length") == 0
    assert browser.evaluate("document.querySelector('#answers details details').open")  # as the reader left it
    assert "after 0 steps" in browser.evaluate("document.getElementById('histograms').innerText")
    # The third of five steps is under the middle of a curve.
    x, y, width = browser.evaluate(
        "(({ x, y, width }) => [x, y, width])(document.querySelector('.plot').getBoundingClientRect())"
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x + width / 2, y=y + 20, button="left", clickCount=1)
    assert value_of(browser, "score") == "10.5"
    path = "document.querySelector('[data-figure={}] path:nth-child(2)').getAttribute('d')"
    assert browser.evaluate(path.format("loss")).count("M") == 2  # a gap at what is no number
    assert browser.evaluate(path.format("held_out")) == "M25.00 3.00h0L75.00 3.00"  # none at steps without a figure
    assert "reward 1, 9 tokens" in browser.evaluate("document.getElementById('answers').innerText")
    assert browser.messages == []


def test_runs_figures_and_options_can_be_chosen(runs, browser):
    cli.main(["report", *runs, "--out", "page.html"])
    browser.messages.clear()
    browser.open(Path("page.html"), *DESK)
    marked = "[...document.querySelectorAll('tr.differs th')].map((cell) => cell.textContent)"
    assert browser.evaluate(marked) == ["≠ score_weight", "≠ result: after.score"]
    assert "part at step 1: score 0.5 | 0.25" in browser.evaluate("document.getElementById('differences').innerText")
    browser.evaluate("document.getElementById('only').click()")
    assert browser.evaluate("document.querySelectorAll('#options tbody tr').length") == 2
    browser.evaluate("document.querySelectorAll('#legend input')[1].click()")
    assert value_of(browser, "score") == "2"
    browser.evaluate("byId('filter').value = 'LOS'; byId('filter').dispatchEvent(new Event('input'))")
    shown = "[...document.querySelectorAll('#figures .card')].filter((c) => !c.hidden).map((c) => c.dataset.figure)"
    assert browser.evaluate(shown) == ["loss"]
    assert browser.messages == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK])
def test_the_page_fits_its_window_and_its_text_stands_out_in_both_schemes(size, scheme, runs, browser):
    cli.main(["report", *runs, "--out", "page.html"])
    browser.messages.clear()
    browser.open(Path("page.html"), *size, scheme)
    browser.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    assert browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert browser.evaluate("innerWidth") == size[0]
    ink, paper = browser.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert contrast(ink, paper) > 7 and (luminance(paper) > 0.5) == (scheme == "light")
    assert browser.messages == []


def test_the_figures_of_a_teacher_are_those_of_the_last_comparison_up_to_the_step(runs, browser):
    cli.main(["report", *runs, "--out", "page.html"])
    browser.messages.clear()
    browser.open(Path("page.html"), *DESK)
    text = "document.getElementById('teachers').innerText"
    assert "step 4" in browser.evaluate(text) and "100.0 %" in browser.evaluate(text)
    assert browser.evaluate("document.querySelector('#teachers tbody td').textContent") == "1"
    assert HOSTILE in browser.evaluate(text) and "⏎" in browser.evaluate(text)
    browser.evaluate("byId('step').value = 2; byId('step').dispatchEvent(new Event('input'))")
    assert "step 1" in browser.evaluate(text) and "25.0 %" in browser.evaluate(text)
    assert browser.messages == []


def luminance(colour):
    """Relative luminance by WCAG 2 of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_a_run_of_curves_alone_has_no_empty_parts(tmp_path, monkeypatch, browser):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f'{{"step": {s}, "loss": {s}}}\n' for s in range(3000)))
    assert cli.main(["report", "run"]) == 0
    browser.messages.clear()
    browser.open(Path("run/report.html"), *DESK)
    shown = "[...document.querySelectorAll('section:not([hidden]) h2')].map((title) => title.textContent)"
    assert browser.evaluate(shown) == ["Figures", "Options and results"]
    # Of 3000 numbers in a straight line the smallest and the largest of each ten are drawn.
    assert (
        browser.evaluate("document.querySelector('.plot path:nth-child(2)').getAttribute('d').split('L').length") == 600
    )
    assert browser.messages == []


def test_a_built_wheel_has_the_pages_files(tmp_path):
    source = tmp_path / "source"  # setuptools leaves its own files where it builds
    for name in ("hybrid_engine", "containers", "ops", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"hybrid_engine/rlhf/reports/{name}" for name in ("page.html", "page.css", *reports.SCRIPTS)} <= set(names)
