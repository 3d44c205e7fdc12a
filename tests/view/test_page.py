"""The page in a real browser: every view shows its data and runs no script of a sample."""

import asyncio
import base64
import io
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from tests.support.browser import Page, find_browser, open_page
from tests.support.view.run_files import (
    LOST,
    sample,
    write_journal,
    write_lines,
    write_metrics,
    write_samples,
    write_trace,
)

ROOT = Path(__file__).parents[2]
BROWSER = find_browser()
HOSTILE = "<script>document.title='stolen'</script><img src=x onerror=\"document.title='stolen'\"> it's \"5\" & 6"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium, or set HYBRIDRL_TEST_BROWSER"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "mine"
    write_metrics(path, range(1, 4), **{"critic/score/mean": 0.5})
    first = sample(1, 0, answer=HOSTILE, prompt=HOSTILE, score=1.0) | {HOSTILE: HOSTILE}
    write_samples(path, 1, [first, sample(1, 1)])
    write_samples(path, 2, [sample(2, 0, answer="later", prompt=HOSTILE)])
    record = {"id": first["id"], "tokens": [HOSTILE, " end"], "mask": [1, 1], "advantage": [0.5, 0.5]}
    spoken = {"id": sample(1, 1)["id"], "tokens": [CALL, " 5", HOSTILE], "mask": [1, 0, 1], "advantage": [0.5] * 3}
    more = {"old": [-0.1, -0.9], "rollout": [-0.2, -0.3]}
    write_lines(path / "rollouts" / "tokens" / "1.jsonl", [record | more, spoken])
    write_trace(path, 5)
    write_journal(path, LOST)
    write_lines(path / "failures.jsonl", [{"step": 2, "lost": [HOSTILE], "detected_at": 1.0, "seconds": 1.5}])
    write_lines(path / "ledger.jsonl", [{"begin": 0, "rows": 9}, {"step": 1, "prompts": [1, 2], "stages": {"adv": 1}}])
    (path / "config.json").write_text(json.dumps({"trainer": {"total_training_steps": 3, "project_name": HOSTILE}}))
    return path


@pytest.fixture(scope="module")
def address(run) -> Iterator[str]:
    with served(run) as found:
        yield found


def jpeg(width: int, height: int) -> str:
    """Return a picture as samples keep it."""
    with io.BytesIO() as stream:
        Image.new("RGB", (width, height), "red").save(stream, "JPEG")
        return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Return the address of the page of a run."""
    command = [sys.executable, "-m", "hybridrl.cli", "view", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as program:
        assert program.stdout is not None
        yield program.stdout.readline().split(" at ")[1].split()[0]
        program.terminate()


def look(address: str, view: str, visit: Callable[[Page], Awaitable[None]]) -> None:
    async def main() -> None:
        assert BROWSER is not None
        async with open_page(BROWSER) as page:
            await page.open(f"{address}#{view}")
            await visit(page)
            assert await page.value("document.title") == "hybridrl view" and page.errors == []

    asyncio.run(asyncio.wait_for(main(), 100))


def test_curves_are_drawn_and_follow_the_run(address, run):
    async def visit(page: Page) -> None:
        await page.until("document.querySelectorAll('.u-wrap').length >= 1")
        await page.until("document.querySelector('.run').innerText.includes('step 3 of 3')")
        write_metrics(run, [4], **{"critic/score/mean": 0.75})
        await page.until("document.querySelector('.run').innerText.includes('step 4')")
        await page.until("document.querySelector('.chart .value').innerText.includes('0.75')")
        await page.value("[...document.querySelectorAll('input[type=range]')].map(e => [e.value = 0.9, e.oninput()])")
        await page.value("document.querySelector('input[type=checkbox][checked]')")
        await page.until("document.querySelectorAll('.u-wrap').length >= 1")

    look(address, "curves", visit)


def test_a_sample_is_text_and_its_tokens_have_colours(address):
    async def visit(page: Page) -> None:
        await page.until("document.querySelectorAll('.sample dl').length === 3")
        shown = await page.value("[...document.querySelectorAll('.sample')].map(e => e.innerText).join('|')")
        assert (
            shown.count(HOSTILE) >= 4
            and await page.value("document.querySelectorAll('main script, main img').length") == 0
        )
        button = "[...document.querySelectorAll('.sample')][1].querySelectorAll('button')[0]"
        await page.value(f"{button}.click()")
        await page.until("document.querySelectorAll('.token').length === 2")
        assert await page.value("document.querySelector('.token').innerText") == HOSTILE
        colours = "[...document.querySelectorAll('.token')].map(e => e.style.backgroundColor)"
        positive, negative = await page.value(colours)
        assert positive.startswith("rgba(235") and negative.startswith("rgba(52")

    look(address, "samples", visit)


def test_pictures_of_a_prompt_keep_their_form_and_small_ones_are_enlarged(tmp_path):
    path = tmp_path / "seen"
    write_metrics(path, range(1, 3), **{"critic/score/mean": 0.5})
    write_samples(
        path, 1, [sample(1, 0) | {"images": [jpeg(8, 8), jpeg(256, 4), jpeg(256, 192), "http://localhost/x"]}]
    )

    async def visit(page: Page) -> None:
        await page.until("[...document.querySelectorAll('.sample img')].every(e => e.complete && e.naturalWidth)")
        sizes = "[...document.querySelectorAll('.sample img')].map(e => [e.clientWidth, e.clientHeight])"
        await page.until(f"{sizes}[0]?.[1] === 64")
        assert await page.value(sizes) == [[64, 64], [256, 4], [213, 160]]

    with served(path) as address:
        look(address, "samples", visit)


def test_turns_of_policy_and_environment_are_apart_and_name_the_calls(address):
    async def visit(page: Page) -> None:
        await page.until("document.querySelectorAll('.sample dl').length === 3")
        await page.value("[...document.querySelectorAll('.sample')][2].querySelectorAll('button')[0].click()")
        await page.until("document.querySelectorAll('.turn').length === 3")
        turns = "[...document.querySelectorAll('.turn')]"
        assert await page.value(f"{turns}.map(e => e.className)") == ["turn", "turn environment", "turn"]
        assert "calls add(a=2, b=3)" in await page.value(f"{turns}[0].innerText")
        assert HOSTILE in await page.value(f"{turns}[2].innerText")

    look(address, "samples", visit)


def test_samples_are_searched_and_a_prompt_is_followed(address):
    async def visit(page: Page) -> None:
        await page.until("document.querySelectorAll('.sample dl').length === 3")
        await page.value("Object.assign(document.querySelectorAll('.controls input')[1], {value: '1'}).onchange()")
        await page.value("document.querySelector('button.main').click()")
        await page.until("document.querySelectorAll('.sample dl').length === 1")
        follow = "[...document.querySelectorAll('button')].find(e => e.innerText === 'follow this prompt')"
        await page.value(f"{follow}.click()")
        await page.until("document.querySelectorAll('.sample dl').length === 2 && !!document.querySelector('.u-wrap')")

    look(address, "samples", visit)


@pytest.mark.parametrize(
    ("view", "shown"),
    [
        ("settings", ["trainer.total_training_steps", HOSTILE]),
        ("timeline", ["prepare", "update", "actor 0", "40.0 %"]),
        ("failures", ["actor-0", "killed by SIGKILL", "the trainer rebuilds role actor", HOSTILE]),
        ("graph", ["steps in the weights"]),
    ],
)
def test_the_other_views_show_what_the_run_wrote(address, view, shown):
    async def visit(page: Page) -> None:
        await page.until("document.querySelectorAll('table.list').length >= 1")
        for text in shown:
            await page.until(f"document.querySelector('main').innerText.includes({json.dumps(text)})")
        if view == "timeline":
            assert await page.value("document.querySelector('canvas').height") > 60
        if view == "graph":
            await page.until("document.querySelector('main').innerText.includes('no graph')")
            page.errors.clear()  # the picture's 404

    look(address, view, visit)
