"""The chat page in a browser: streaming, thinking, tools, branches, stop, errors; and that text from outside stays text."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import chromium
import pytest
from chromium import Chromium
from scripted_engine import ScriptedEngine, spoken

from gnomon.data.chat import ChatFormat
from gnomon.data.messages import ToolCall
from gnomon.data.tokenizer import Tokenizer
from gnomon.serve.server import Background
from gnomon.serve.service import Service

needs_browser = pytest.mark.skipif(chromium.program() is None, reason="no Chromium on this machine")
EVIL = 'So:\n\n```html\n<script>window.hacked = 1</script>\n```\n\n<img src="x" onerror="window.hacked = 1"> and **bold**, `code`.'
READY = "document.body.dataset.state === 'ready' && document.querySelectorAll('article').length === {}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A browser for the tests of this file."""
    with Chromium(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(browser: Chromium, server_url: str) -> Chromium:
    """The chat page, ready to be typed into."""
    browser.complaints.clear()
    browser.open(server_url)
    browser.until("document.body.dataset.model === 'tiny'")
    browser.evaluate("sessionStorage.clear(); localStorage.clear(); delete document.body.dataset.model; location.reload()")
    browser.until("document.readyState === 'complete' && document.body.dataset.model === 'tiny'")
    browser.evaluate("document.getElementById('text').focus()")
    return browser


def say(page: Chromium, text: str) -> None:
    page.type(text)
    page.press("Enter")


def text(page: Chromium, selector: str) -> str:
    return page.evaluate(f"[...document.querySelectorAll({selector!r})].map((found) => found.innerText).join('|')")


@needs_browser
def test_a_stream_without_its_end_is_broken(page: Chromium) -> None:
    page.evaluate("""window.fetch = async () => new Response('data: {"choices": [{"delta": {"content": "half an ans"}}]}\\n\\n')""")
    say(page, "hello")
    page.until(READY.format(2))
    assert text(page, "article.assistant .body") == "half an ans"
    assert "broke off" in text(page, "article.assistant p.error")


@needs_browser
def test_a_conversation(page: Chromium, scripted: ScriptedEngine, chat: ChatFormat) -> None:
    scripted.cached, scripted.note = 64, "new from token 64 on"
    scripted.script = lambda request: spoken(chat, EVIL, reasoning="I <b>think</b>")
    say(page, "<i>hello</i>")
    page.until(READY.format(2))
    assert text(page, "article.user .body") == "<i>hello</i>"
    assert page.evaluate("document.querySelector('details.thinking').open") is False
    assert page.evaluate("document.querySelector('details.thinking div').textContent") == "I <b>think</b>"
    assert page.evaluate("document.querySelector('article pre').innerText") == "<script>window.hacked = 1</script>"
    assert "onerror" in text(page, "article.assistant .body") and text(page, "article.assistant b") == "bold"
    assert page.evaluate("window.hacked === undefined && !document.querySelector('main img, main script')")
    assert text(page, ".foot .cached") == "64 cached"
    assert page.evaluate("document.querySelector('.foot .cached').title") == "new from token 64 on"
    say(page, "and more?")
    page.until(READY.format(4))
    assert len(scripted.requests[1].prompt) > len(scripted.requests[0].prompt)
    assert not page.complaints


@needs_browser
def test_branches_are_kept(page: Chromium, scripted: ScriptedEngine, chat: ChatFormat) -> None:
    scripted.script = lambda request: spoken(chat, f"answer {len(scripted.requests)}", reasoning="hm")
    say(page, "first")
    page.until(READY.format(2))
    page.evaluate("[...document.querySelectorAll('.foot button')].find((b) => b.textContent === 'Again').click()")
    page.until("document.body.dataset.state === 'ready' && document.body.innerText.includes('answer 2')")
    assert "2/2" in text(page, "article.assistant .foot")
    page.evaluate("document.querySelector('.branch button').click()")
    assert text(page, "article.assistant .body") == "answer 1"
    page.press("ArrowUp")  # in an empty composer: edit the last message
    page.until("document.querySelector('.edit textarea') !== null")
    page.type(" changed")
    page.press("Enter")
    page.until("document.body.innerText.includes('answer 3')")
    page.until(READY.format(2))
    assert text(page, "article.user .body") == "first changed" and scripted.requests[0].prompt == scripted.requests[1].prompt
    page.evaluate("delete document.body.dataset.model; location.reload()")
    page.until("document.readyState === 'complete' && document.body.dataset.model === 'tiny'")
    assert text(page, "article.user .body") == "first changed"  # a reload keeps the conversation
    page.press("O", control=True, shift=True)
    assert page.evaluate("document.querySelectorAll('article').length") == 0


@needs_browser
def test_tools_and_their_answers(page: Chromium, scripted: ScriptedEngine, chat: ChatFormat, vocabulary: Tokenizer) -> None:
    calls = (ToolCall(id="a", name="weather", arguments='{"city": "Bern"}'),)
    scripted.script = lambda request: spoken(chat, reasoning="hm", calls=calls)
    tools = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
    page.evaluate(f"document.getElementById('tools').value = {tools!r}")
    page.evaluate("document.getElementById('effort').value = 'low'")
    say(page, "weather?")
    page.until(READY.format(2))
    assert text(page, ".call b") == "weather" and '"city": "Bern"' in text(page, ".call pre")
    prompt = vocabulary.decode(scripted.requests[0].prompt)
    assert '"name":"weather"' in prompt and "thinking_effort=low" in prompt
    scripted.script = lambda request: spoken(chat, "It rains.", reasoning="hm")
    page.evaluate("document.querySelector('.call textarea').focus()")
    say(page, "rain")
    page.until(READY.format(4))
    assert text(page, "article.assistant .body").endswith("It rains.") and "rain" in vocabulary.decode(scripted.requests[1].prompt)
    page.evaluate("document.getElementById('effort').value = document.getElementById('tools').value = ''")


@needs_browser
def test_stop_and_errors(page: Chromium, scripted: ScriptedEngine, chat: ChatFormat) -> None:
    words = spoken(chat, "word " * 400, reasoning="hm")
    scripted.script, scripted.pause = lambda request: words, 0.01
    say(page, "go")
    page.until("document.querySelector('article.assistant .body')?.innerText.includes('word')")
    page.press("Escape")
    page.until(READY.format(2))
    assert "stopped" in text(page, ".foot")
    for _ in range(500):  # the server hears of it a moment later
        if scripted.closed:
            break
        time.sleep(0.01)
    assert scripted.closed and not scripted.live
    scripted.pause, scripted.error = 0.0, "out of <luck>"
    page.evaluate("document.getElementById('text').focus()")
    say(page, "again")
    page.until(READY.format(4))
    assert text(page, ".error") == "the engine failed: out of <luck>"
    scripted.error, scripted.max_tokens = None, 20
    say(page, "longer")
    page.until(READY.format(6))
    assert "400: the context is 20 tokens long" in text(page, ".error")


@needs_browser
@pytest.mark.parametrize(("width", "height"), [(360, 640), (1280, 800)])
def test_it_fits(page: Chromium, scripted: ScriptedEngine, chat: ChatFormat, width: int, height: int) -> None:
    scripted.script = lambda request: spoken(chat, "x" * 500 + "\n\n```\n" + "y" * 300 + "\n```", reasoning="hm")
    page.resize(width, height, phone=width < 500)
    say(page, "wide")
    page.until(READY.format(2))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth && document.querySelector('main').scrollWidth <= innerWidth")
    assert page.evaluate("document.getElementById('send').getBoundingClientRect().right <= innerWidth")
    page.resize(900, 700)


@needs_browser
def test_a_key_is_asked_for(browser: Chromium, service: Callable[..., Service], tmp_path: Path) -> None:
    with Background(service(), {"me": "secret-key"}) as url:
        browser.open(url)
        browser.until("document.getElementById('context').innerText.includes('API key is required')")
        assert browser.evaluate("document.getElementById('panel').hidden") is False
        browser.evaluate("document.getElementById('key').focus()")
        browser.type("secret-key")
        browser.evaluate("document.getElementById('key').dispatchEvent(new Event('change'))")
        browser.until("document.body.dataset.model === 'tiny'")
        browser.evaluate("document.getElementById('text').focus()")
        say(browser, "hello")
        browser.until(READY.format(2))
        assert text(browser, "article.assistant .body") == "Hello world"


def test_the_page_asks_nobody_else() -> None:
    folder = Path(__file__).resolve().parents[2] / "src" / "gnomon" / "serve" / "page"
    for file in folder.iterdir():
        content = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in content and "https://" not in content and "innerHTML" not in content and "eval(" not in content
