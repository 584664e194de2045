"""Stop strings in any pieces, and the whole API tried from its own description: nothing is a server error, every status is documented."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import checks
from scripted_engine import ScriptedEngine, spoken
from serving_fixtures import chat, vocabulary

from gnomon.data.chat import ChatFormat
from gnomon.data.tokenizer import Tokenizer
from gnomon.serve.access import Access
from gnomon.serve.api import create_app
from gnomon.serve.logs import RequestLog
from gnomon.serve.service import Service
from gnomon.serve.settings import ServeSettings
from gnomon.serve.stops import StopStrings

__all__ = ["chat", "vocabulary"]

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple)


def first_complete(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """What comes before the stop string that is complete first, read letter by letter."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[:end - len(longest)], longest
    return text, None


@given(LETTERS, STOPS, st.lists(st.integers(0, 30), max_size=8))
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    looking = StopStrings(stops)
    said, sent = "", ""
    for start, stop in zip(places, places[1:]):
        sent += looking.feed(text[start:stop])
        said += text[start:stop]
        assert first_complete(text, stops)[0].startswith(sent)  # never a letter too much
    sent += looking.flush() if looking.matched is None else ""
    assert (sent, looking.matched) == first_complete(text, stops)


@pytest.fixture(scope="module")
def description(chat: ChatFormat, vocabulary: Tokenizer) -> Iterator[schemathesis.BaseSchema]:
    """The API over a scripted engine, in this process, and its own description."""
    engine = ScriptedEngine(script=lambda request: spoken(chat, "ok", reasoning="hm"))
    service = Service(engine, chat, vocabulary, ServeSettings(log="none"), "tiny")
    app = create_app(service, Access(service.settings.access, {}), RequestLog("none"))
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    service.close()


CHECKS = [checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]


def everything(description: schemathesis.BaseSchema, examples: int) -> dict[int, int]:
    """Try so many bodies on each operation; how often each status came."""
    statuses: dict[int, int] = {}
    for found in description.get_all_operations():
        operation = found.ok()

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(), st.booleans())
        def tried(case: schemathesis.Case, known: bool) -> None:
            if isinstance(case.body, dict) and "model" in case.body and known:
                case.body["model"] = "tiny"  # far enough to be answered
            response = case.call()
            case.validate_response(response, checks=CHECKS)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1

        tried()
    return statuses


def test_anything_that_the_description_allows(description: schemathesis.BaseSchema) -> None:
    statuses = everything(description, 6)
    assert statuses[200] > 3 and statuses[404] > 0


@pytest.mark.slow
def test_very_much_that_the_description_allows(description: schemathesis.BaseSchema) -> None:
    everything(description, 100)
