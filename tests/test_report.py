"""Report and terminal view: right numbers, nothing loaded from anywhere, no text of a run is ever markup.

    python -m pytest -q tests/test_report.py
"""
import json
import re
import shutil
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser

import pytest

import fidelity
import report
import small_run
from buffer import record_problems
from config import UserError
from envs import Task
from rollouts import Episode, Turn


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    return [small_run.make(base / f"s{seed}", seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def html(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "report.html"
    report.write(folders, out)
    return out.read_text(encoding="utf-8")


def data_of(html):
    return json.loads(re.search(r"<script type=application/json id=data>(.*?)</script>", html, re.DOTALL)[1])


# ------------------------------------------------------------------------------------------------ numbers
def test_band_over_seeds_is_the_t_interval():
    assert report.band([0.4, 0.6]) == pytest.approx((0.5, 0.5 - 12.7062 * 0.1, 0.5 + 12.7062 * 0.1), abs=1e-4)
    mean, low, high = report.band([1.0, 2.0, 3.0, 4.0])        # t(3) = 3.1824, s = 1.2910
    assert (mean, high - mean) == pytest.approx((2.5, 3.1824 * 1.29099 / 2), abs=1e-4)


def test_band_of_one_seed_is_wilson_or_none():
    assert report.band([0.3]) == (0.3, None, None)
    assert report.band([0.5], 100) == (0.5, *fidelity.wilson(50, 100))
    assert report.band([0.5, 0.5], 100) == (0.5, *fidelity.wilson(50, 100))    # two that agree by chance


def test_runs_that_differ_in_their_seed_are_one_method(folders, tmp_path):
    other = small_run.make(tmp_path / "other", 0, "rl.lr=0.001")
    runs = [report.read_run(f) for f in (*folders, other)]
    groups = report.methods(runs)
    assert [[run.name for run in group] for _, group in groups] == [["s0", "s1"], ["other"]]
    series = report.curve("x", groups[0][1], "dream", "success")
    assert [p[0] for p in series.points] == [1, 2, 3] and series.points[0][1] == pytest.approx(0.605)
    assert [p[0] for p in report.curve("x", groups[0][1], "dream", "real_greedy").points] == [3]
    assert report.curve("x", groups[0][1], "real", "success").points == []
    assert "rl.lr" in report.seen(groups, runs[2])


@pytest.mark.parametrize("low, high", [(0, 1), (0, 0.25), (1, 25), (0, 3e-6), (0, 1234), (1, 2)])
def test_ticks_are_few_round_and_inside(low, high):
    found = report.ticks(low, high)
    assert 2 <= len(found) <= 7 and all(low - 1e-9 <= t <= high * (1 + 1e-9) for t in found)


# ------------------------------------------------------------------------------------------------ episodes
def test_choose_spreads_over_iterations_and_outcomes(folders):
    cfg, _ = report.run_config(folders[0])
    dreams = list(report.Episodes(folders[0], cfg).by_file["dream.jsonl"].values())
    assert len(report.choose(dreams, 100)) == len(dreams)
    assert len(report.choose(dreams, 4)) == 4
    assert {e[-1].success for e in report.choose(dreams, 4)} == {True, False}
    assert report.choose([], 4) == []


def test_real_counterpart_and_demonstrations(folders):
    cfg, _ = report.run_config(folders[0])
    episodes = report.Episodes(folders[0], cfg)
    honest, liar = episodes.find("dream-0-0/0"), episodes.find("dream-0-0/1")
    replayed = episodes.replay(honest)
    assert [r.next_state for r in replayed] == [t.next_state for t in honest] and replayed[-1].success
    data = report.episode_data(liar, "s0", None, episodes.replay(liar))
    assert data["kind"] == "disagrees" and data["turns"][-1]["realEnd"] == "failure"
    assert episodes.replayed == len(honest) + len(liar)
    assert episodes.replay(episodes.find("dream-2-0/0")) is None           # a synthetic task
    shown = episodes.demonstrations([honest, liar])
    assert set(shown) == {"dream-0-0/0", "dream-0-0/1"} and len(shown["dream-0-0/0"]) == len(honest)
    for demo in (d for turn in shown["dream-0-0/0"] for d in turn):
        assert demo.source == "real" and demo.task_id != honest[0].task_id


def test_played_episodes_as_transitions():
    task = Task("t", "a chair", "test", "[home]")
    turns = [Turn("[home]", [], [], "search a", "[results]", 0.0, False, False),
             Turn("[results]", [], [], "click 1", "[done]", 1.0, False, False)]
    played = Episode(task, "g", turns, terminated=True, success=True, source="real")
    first, last = report.transitions_of([played], "real")
    assert (first.done, first.history, last.done, last.success, last.history) == (False, [], True, True, ["search a"])
    assert last.episode == "real/0" and not record_problems(asdict(first)) + record_problems(asdict(last))


def test_marked_words():
    assert report.marked("a b c", "a x c d") == ([["a", False], ["b", True], ["c", False]],
                                                 [["a", False], ["x", True], ["c", False], ["d", True]])
    assert report.marked("a b", "a b") == ([["a b", False]], [["a b", False]])


# ------------------------------------------------------------------------------------------------ the page
class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_no_text_of_a_run_becomes_markup(html):
    tags = Tags()
    tags.feed(html)
    assert sum(tag == "script" for tag, _ in tags.found) == 2 and not any(tag == "b" for tag, _ in tags.found)
    assert html.count("document.title") == html.count("&lt;/script&gt;&lt;script&gt;document.title") + html.count(
        "\\u003c/script>\\u003cscript>document.title")
    [hostile] = [e for e in data_of(html) if e["taskId"] == "syn-0" and e["run"] == "s0"]
    assert hostile["task"] == small_run.HOSTILE and not hostile["replayed"]


def test_nothing_is_loaded_from_anywhere(html):
    tags = Tags()
    tags.feed(html)
    assert not [a for _, attributes in tags.found for a in attributes if a in ("src", "href", "srcset", "action")]
    assert "http:" not in html and "https:" not in html and "url(" not in html and "@import" not in html
    assert "default-src 'none'" in html


def test_page_holds_what_it_promises(html):
    for heading in ("Success in the dream", "Reward entropy", "KL to", "Fidelity", "Real interactions",
                    "Trajectories", "Configuration", "tasks_per_step", "failures declared successful",
                    "rule: first hit"):
        assert heading in html
    assert html.count("<polygon") >= 4                         # bands over the two seeds
    assert {e["kind"] for e in data_of(html)} >= {"success", "failure", "disagrees", "real"}


def test_unfinished_run_and_foreign_machine(folders, tmp_path):
    young = tmp_path / "young"
    young.mkdir()
    shutil.copy(folders[0] / "config.yaml", young)
    assert "not measured yet" in report.page([report.read_run(young)])
    moved = tmp_path / "moved"
    shutil.copytree(folders[0], moved)
    text = (moved / "config.yaml").read_text().replace("data: null", "data: /nowhere/else")
    (moved / "config.yaml").write_text(text)
    page = report.page([report.read_run(moved)])
    assert "no real counterparts" in page and "/nowhere/else" in page and len(data_of(page)) > 6
    with open(moved / "dream.jsonl", "a", encoding="utf-8") as file:
        file.write('{"state": "[ho')                          # of a process that is writing now
    report.read_run(moved)
    assert report.Episodes(moved, report.run_config(moved)[0]).find("-1")[0].episode == "dream-2-0/1"


@pytest.mark.parametrize("name", ["metrics.jsonl", "results.json", "stages.json", "fidelity.json", "run.json",
                                  "dream.jsonl"])
def test_damaged_files_are_named(name, folders, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folders[0], broken)
    (broken / name).write_text('{"stage": [\n')
    with pytest.raises(UserError, match=f"{name}"):
        report.page([report.read_run(broken)])


def test_wrong_folders(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        report.read_run(tmp_path / "nope")
    with pytest.raises(UserError, match="no run folder"):
        report.read_run(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        report.write([], tmp_path / "nope" / "report.html")


# ------------------------------------------------------------------------------------------------ terminal
def test_show(folders):
    text = report.episode_text(folders[0], "2", width=100)
    assert text.startswith("episode dream-0-0/1 (dream)") and "demo " in text and "the same" in text
    assert text.endswith("nothing learns from them)") and "dreamed success, real failure" in text
    assert max(map(len, text.splitlines())) <= 100
    hostile = report.episode_text(folders[0], "dream-2-0/0")
    assert "\x1b" not in hostile and "synthetic" in hostile
    assert report.episode_text(folders[0], "-1").startswith("episode dream-2-0/1")
    assert "(real)" in report.episode_text(folders[0], "expert-000000")


@pytest.mark.parametrize("wanted, message", [("99", "1 to 6"), ("0", "1 to 6"), ("dream-0-0/9", "did you mean dream-")])
def test_unknown_episode(folders, wanted, message):
    with pytest.raises(UserError, match=message):
        report.episode_text(folders[0], wanted)


# ------------------------------------------------------------------------------------------------ a real browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_rendered_by_a_browser(html, tmp_path, width):
    """The script runs without an error, asks for nothing, shows an episode of hostile text with its demonstrations open,
    and nothing is wider than the screen.  The page is in a frame, because a headless window cannot be as narrow as a
    phone."""
    watch = ("<script>const errors = []\n"
             "for (const kind of ['error', 'unhandledrejection', 'securitypolicyviolation']) addEventListener(kind, "
             "e => errors.push(kind + ' ' + (e.message || e.blockedURI || e.reason)), true)\n"
             "for (const kind of ['error', 'warn']) console[kind] = text => errors.push(kind + ' ' + text)</script><style>")
    probe = ("<script>filter.value = ''; list(); picker.value = all.findIndex(e => e.taskId === 'syn-0'); show()\n"
             "document.querySelectorAll('details').forEach(d => d.open = true)\n"
             "parent.postMessage(JSON.stringify({errors, asked: performance.getEntriesByType('resource').map(e => e.name), "
             "opened: document.querySelectorAll('.turn details .text').length, "
             "turns: document.querySelectorAll('.turn').length, "
             "marks: document.querySelectorAll('#view b, #view script').length, title: document.title, "
             "text: view.textContent.includes('<b>bold</b>'), inner: innerWidth, "
             "wide: document.documentElement.scrollWidth}), '*')</script></html>")
    page = html.replace("<style>", watch, 1).replace("</html>", probe)
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text("<body><script>onmessage = e => { document.body.dataset.probe = e.data }</script>"
                     f"<iframe src=report.html width={width} height=844></iframe>")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
             "--window-size=1400,900", "--virtual-time-budget=3000", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, f"file://{frame}"], capture_output=True, text=True, timeout=120)
    found = Tags()
    found.feed(done.stdout)
    seen = json.loads(next(a["data-probe"] for tag, a in found.found if tag == "body"))
    assert seen["errors"] == seen["asked"] == [] and seen["opened"] >= 2
    assert seen["turns"] >= 2 and seen["marks"] == 0 and seen["text"] and seen["title"].startswith("DreamGym")
    assert seen["inner"] == width and seen["wide"] <= width
