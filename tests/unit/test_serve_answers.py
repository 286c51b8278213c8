"""What OpenAI's clients get: stop words wherever they are, likelihoods of tokens, refusals, and
leaving early.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.generate import TextStateMachine
from mlx_lm.models.llama import Model, ModelArgs
from serving import Served, parsed, received, served
from tiny import SPECIAL, write_model, write_tokenizer

from allhands.infer.replies import Answer, Piece
from allhands.infer.texts import StopWords, TextStream, TokenBytes
from allhands.model.load import load_tokenizer
from allhands.model.tokenizer import positions_of

openai = pytest.importorskip("openai")

WORDS = (
    "Ġdried",
    "Ġleaves",
    "Ġand",
    "herbs",
    ",Ġ",
    "Ã©tÃ©",
    "ðŁ",
    "æ°´",
    "Ġwater",
    "inĠthe",
    "Ġa",
    "bcd",
)
QUESTION = [{"role": "user", "content": "What is tea?"}]


# --- stop words in any text -----------------------------------------------------------------------


def cut_at(text: str, words: list[str]) -> str:
    """The text before the stop word that is complete first, letter by letter."""
    for end in range(1, len(text) + 1):
        if begun := [end - len(word) for word in words if text[:end].endswith(word)]:
            return text[: min(begun)]
    return text


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_is_cut_at_the_first_stop_word_however_it_comes(
    pieces: list[str], words: list[str]
) -> None:
    stop, passed = StopWords(words), ""
    for piece in pieces:
        passed += stop.add(piece)
        # Nothing that may still become a stop word has been let through.
        assert cut_at("".join(pieces), words).startswith(passed)
    if not stop.found:
        passed += stop.finish()
    assert passed == cut_at("".join(pieces), words)
    assert stop.found == any(word in "".join(pieces) for word in words)
    assert stop.passed == len(passed)


def test_what_cannot_become_a_stop_word_is_not_held_back() -> None:
    stop = StopWords(["herbs", "\n\n"])
    assert [stop.add(piece) for piece in ("dried ", "her", "e is\n", "tea", "her", "bs!", "x")] == [
        *("dried ", "", "here is", "\ntea", "", "", "")
    ]
    assert stop.found


# --- a model whose tokens are words and parts of characters ---------------------------------------


@pytest.fixture(scope="module")
def wordy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with tokens of several letters, and some that are half a character."""
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(1, len(word)):
            if (pair := (word[:end], word[end])) not in merges:
                merges.append(pair)
    directory = tmp_path_factory.mktemp("model") / "wordy"
    directory.mkdir()
    write_tokenizer(directory, merges)
    config = {
        **{
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "vocab_size": 0,
        },
        **{
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        **{
            "architectures": ["LlamaForCausalLM"],
            "eos_token_id": 2,
            "max_position_embeddings": 200,
        },
        "vocab_size": len(SPECIAL) + 256 + len(merges),
    }
    mx.random.seed(4)
    weights = dict(tree_flatten(Model(ModelArgs.from_dict(config)).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def server(wordy_model: Path) -> Iterator[Served]:
    with served("--model", wordy_model, "--max-tokens", "60") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=server.address, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def likely(wordy_model: Path) -> dict[str, float]:
    """A bias towards words and whole or half characters, and away from the end."""
    tokenizer: Any = load_tokenizer(str(wordy_model)).tokenizer
    some = [*range(259, len(tokenizer)), *tokenizer.encode("ab é水\n", add_special_tokens=False)]
    return {**{str(token): 20.0 for token in some}, "2": -100.0}


def streamed(pieces: Any) -> tuple[str, str | None, list[Any]]:
    """The text of a stream, how it ended, and its tokens."""
    text, finish, tokens = "", None, list[Any]()
    for piece in pieces:
        for choice in piece.choices:
            text += choice.delta.content or ""
            tokens += choice.logprobs.content if choice.logprobs else []
            assert finish is None
            finish = choice.finish_reason
    return text, finish, tokens


@pytest.mark.parametrize("sampled", [{"temperature": 0}, {"temperature": 1, "seed": 11}])
def test_stop_words_end_answers_wherever_they_begin(
    client: Any, wordy_model: Path, likely: dict[str, float], sampled: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {
        "model": str(wordy_model),
        "messages": QUESTION,
        "logit_bias": likely,
        **sampled,
    }
    asked |= {"max_tokens": 60, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    text, tokens = whole.choices[0].message.content, whole.choices[0].logprobs.content
    assert whole.choices[0].finish_reason == "length"
    assert (
        bytes(b for token in tokens for b in token.bytes)
        .decode("utf-8", "replace")
        .removeprefix(" ")
        == text
    )
    found = {text[start : start + size] for start in range(0, 40, 3) for size in (1, 2, 4, 9)}
    for number, word in enumerate(sorted(found)):
        expected = text[: text.index(word)]
        asked["stop"] = word if number % 2 else ["never", word, "never again"]
        answer = client.chat.completions.create(**asked)
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == (expected, "stop")
        # No more than was needed to complete the word.
        needed = text.index(word) + len(word)
        assert answer.usage.completion_tokens <= 60
        known = bytes(
            b for token in tokens[: answer.usage.completion_tokens - 1] for b in token.bytes
        )
        assert len(known.decode("utf-8", "ignore").removeprefix(" ")) < needed
        piecewise, finish, seen = streamed(client.chat.completions.create(**asked, stream=True))
        assert (piecewise, finish) == (expected, "stop")
        assert [token.token for token in seen] == [token.token for token in choice.logprobs.content]
        said = (
            bytes(b for token in seen for b in token.bytes)
            .decode("utf-8", "replace")
            .removeprefix(" ")
        )
        assert expected.startswith(said)


def test_a_stop_word_in_the_first_token(
    client: Any, wordy_model: Path, likely: dict[str, float]
) -> None:
    tokenizer: Any = load_tokenizer(str(wordy_model)).tokenizer
    (leaves,) = tokenizer.encode(" leaves", add_special_tokens=False)
    asked: dict[str, Any] = {
        "model": str(wordy_model),
        "prompt": "dried",
        "max_tokens": 20,
        "temperature": 0,
    }
    asked["logit_bias"] = {str(leaves): 100}
    assert client.completions.create(**asked).choices[0].text.startswith("leaves leaves")
    for word, expected in (
        (" leaves", "leaves"),
        ("leaves", ""),
        ("eave", "l"),
        ("s l", "leave"),
        ("vesl", None),
    ):
        answer = client.completions.create(**asked, stop=word)
        if expected is None:
            assert answer.choices[0].finish_reason == "length"
            continue
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
        assert answer.usage.completion_tokens <= 2
        pieces = list(client.completions.create(**asked, stop=word, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == expected


def test_likelihoods_are_those_of_tokens_as_text(
    client: Any, wordy_model: Path, likely: dict[str, float]
) -> None:
    asked: dict[str, Any] = {
        "model": str(wordy_model),
        "messages": QUESTION,
        "max_tokens": 40,
        "temperature": 1,
    }
    asked |= {"seed": 5, "logit_bias": likely, "logprobs": True, "top_logprobs": 3}
    tokens = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(tokens) == 40
    for one in tokens:
        assert not {"Ġ", "Ã", "ðŁ"} & {one.token, *(top.token for top in one.top_logprobs)}
        assert [top.logprob for top in one.top_logprobs] == sorted(
            (t.logprob for t in one.top_logprobs), reverse=True
        )
        for top in one.top_logprobs:
            assert bytes(top.bytes).decode("utf-8", "backslashreplace") == top.token
    assert any("\\x" in one.token for one in tokens), "no half of a character"
    assert any(one.token.startswith(" ") for one in tokens)
    legacy = client.completions.create(
        model=str(wordy_model), prompt="Tea is", max_tokens=4, logprobs=2
    )
    likelihoods = legacy.choices[0].logprobs
    assert (
        len(likelihoods.tokens)
        == len(likelihoods.token_logprobs)
        == len(likelihoods.text_offset)
        == 4
    )
    assert all(0 < len(top) <= 2 for top in likelihoods.top_logprobs)


def test_tokens_of_sentencepiece_are_bytes_and_spaces() -> None:
    class Detokenizer:
        tokenmap = ()

    class Wrapped:
        detokenizer = Detokenizer()

        def __init__(self) -> None:
            self.added_tokens_decoder = {9: "<｜end｜>"}

        def convert_ids_to_tokens(self, token: int) -> str:
            return {1: "<0xE6>", 2: "▁tea"}[token]

        def decode(self, tokens: list[int]) -> str:
            return {2: "tea"}[tokens[0]]

    tokens = TokenBytes(Wrapped())
    assert (tokens.of(1), tokens.shown(1)) == (b"\xe6", "\\xe6")
    assert tokens.of(2) == b"tea"
    assert tokens.shown(9) == "<｜end｜>"


# --- what is not done -----------------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [TOOL["function"]]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {}},
                }
            },
            "response_format",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": []}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"seed": "x"}, "seed"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"tea": 1}}, "logit_bias"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_done_is_refused_as_openai_does(
    client: Any, wordy_model: Path, more: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **{
                "model": str(wordy_model),
                "messages": QUESTION,
                "stream": stream,
                "extra_body": more,
            }
        )
    assert caught.value.body["type"] == "invalid_request_error"
    assert caught.value.body["code"]
    assert caught.value.body["param"] == param


@pytest.mark.parametrize(
    "more",
    [
        *(
            {"n": 1},
            {"tools": []},
            {"tools": [TOOL], "tool_choice": "none"},
            {"response_format": {"type": "text"}},
        ),
        *(
            {"stop": None},
            {"stop": ["a", "b", "c", "d"]},
            {"temperature": 2},
            {"top_p": 0},
            {"functions": []},
        ),
        *(
            {"logprobs": True, "top_logprobs": 20},
            {"modalities": ["text"]},
            {"metadata": {}},
            {"service_tier": "auto"},
        ),
        {"messages": [{"role": "developer", "content": "Be brief."}, *QUESTION]},
    ],
)
def test_what_changes_nothing_or_is_done_is_taken(
    client: Any, wordy_model: Path, more: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {
        "model": str(wordy_model),
        "messages": QUESTION,
        "max_tokens": 2,
        "extra_body": more,
    }
    assert client.chat.completions.create(**asked).choices


def test_unknown_paths_methods_and_models(client: Any, server: Served, wordy_model: Path) -> None:
    for call in (
        lambda: client.models.retrieve("gpt-4"),
        lambda: client.chat.completions.create(model="gpt-4", messages=QUESTION),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.body["code"], caught.value.body["param"]) == (
            "model_not_found",
            "model",
        )
    assert client.models.retrieve(str(wordy_model)).id == str(wordy_model)
    for call in (
        lambda: client.embeddings.create(model=str(wordy_model), input="x"),
        lambda: client.get("/nothing", cast_to=object),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.body["type"] == "invalid_request_error"
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("DELETE", "/v1/models/x", "GET"),
        ("POST", "/v1/models", "GET"),
    ):
        status, headers, answer = server.ask(method, path)
        assert (status, headers["allow"]) == (405, allowed)
        assert answer["error"]["code"] == "method_not_supported"


def test_roles_that_the_template_has_not(wordy_model: Path, tmp_path: Path) -> None:
    """Zephyr's writes system, user and assistant, and passes over others without a word."""
    shutil.copytree(wordy_model, tmp_path / "zephyr")
    template = (
        "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<|{{ m.role }}|>{{ m.content }}\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (tmp_path / "zephyr" / "chat_template.jinja").write_text(template)
    with served("--model", tmp_path / "zephyr", "--max-tokens", "2") as running:

        def status(*messages: dict[str, Any], **more: Any) -> int:
            return running.ask("POST", "/v1/chat/completions", {"messages": [*messages], **more})[0]

        def said(*messages: dict[str, Any]) -> Any:
            return running.ask("POST", "/v1/chat/completions", {"messages": [*messages]})[2]

        call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
        assert status(*QUESTION) == 200
        assert status({"role": "system", "content": "Be brief."}, *QUESTION) == 200
        developer = said({"role": "developer", "content": "Be brief."}, *QUESTION)
        assert (
            developer["usage"]
            == said({"role": "system", "content": "Be brief."}, *QUESTION)["usage"]
        )
        assert status(*QUESTION, {"role": "tool", "content": "12:00", "tool_call_id": "1"}) == 400
        assert (
            status(*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, *QUESTION)
            == 400
        )
        assert status(*QUESTION, {"role": "assistant", "content": "Leaves."}, *QUESTION) == 200
        assert status(*QUESTION, tools=[TOOL]) == 400


# --- long prompts, and clients that leave ---------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, None),
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024, "n_ctx": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 4096}, "max_position_embeddings": 9}, 4096),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    **{
                        "rope_type": "llama3",
                        "factor": 8.0,
                        "original_max_position_embeddings": 8192,
                    },
                },
            },
            131072,
        ),
        (
            {"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}},
            8192,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            2048,
        ),
    ],
)
def test_positions_of_configurations(config: dict[str, Any], positions: int | None) -> None:
    assert positions_of(config) == positions


def test_a_prompt_beyond_the_models_positions(client: Any, wordy_model: Path) -> None:
    """It has 200; a letter is a token, and the prompt around the question counts, too."""
    asked: dict[str, Any] = {"model": str(wordy_model), "logit_bias": {"2": -100}}
    for messages, refused in (("x" * 100, False), ("x" * 200, True), ("x" * 100_000, True)):
        chat = [{"role": "user", "content": messages}]
        if refused:
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**asked, messages=chat)
            assert (caught.value.body["code"], caught.value.body["param"]) == (
                "context_length_exceeded",
                "messages",
            )
            continue
        answer = client.chat.completions.create(**asked, messages=chat, max_tokens=10**6)
        assert answer.usage.total_tokens == 200
        assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**asked, prompt="x" * 200)
    assert caught.value.body["param"] == "prompt"
    assert client.completions.create(**asked, prompt="x" * 199).usage.completion_tokens == 1
    assert client.completions.create(**asked, prompt=[5] * 199).usage.prompt_tokens == 199


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose prompts take a while."""
    model = write_model(tmp_path_factory.mktemp("model") / "slow", layers=6, hidden=384)
    with served("--model", model) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"seed": 3, "temperature": 0.5}])
@pytest.mark.parametrize("phase", ["prompt", "answer"])
def test_a_client_that_leaves_stops_its_computing(
    slow: Served, more: dict[str, Any], phase: str
) -> None:
    words = f"{phase}{more} " + "What is dew? " * (2000 if phase == "prompt" else 1)
    asked = {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 10**6,
        "logit_bias": {"2": -100},
        **more,
    }
    body = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    short = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert slow.ask("POST", "/v1/chat/completions", short)[0] == 200
    with slow.connect() as leaving:
        leaving.sendall(head.encode() + body)
        time.sleep(0.7)
    begun = time.monotonic()
    assert slow.ask("POST", "/v1/chat/completions", short)[0] == 200
    assert time.monotonic() - begun < 5
    time.sleep(0.7)
    process = psutil.Process(slow.process.pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(0.5)
    assert sum(process.cpu_times()[:2]) - before < 0.3


def test_a_client_that_only_listens_gets_its_answer(slow: Served) -> None:
    """It has closed its side for sending, and waits: it has not left."""
    asked = {
        "messages": [{"role": "user", "content": "Listening. " * 60}],
        "max_tokens": 80,
        "logit_bias": {"2": -100},
    }
    status, _, answer = slow.ask("POST", "/v1/chat/completions", asked)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 80)
    streamed_too = slow.ask("POST", "/v1/chat/completions", {**asked, "stream": True})[2]
    assert streamed_too.rstrip().endswith("data: [DONE]")


def test_a_short_question_does_not_wait_for_somebody_elses_long_prompt(slow: Served) -> None:
    asked = {"messages": [{"role": "user", "content": "Long. " * 400}], "max_tokens": 1}
    done: list[int] = []
    body = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"

    def wait() -> None:
        with slow.connect() as patient:
            patient.settimeout(120)
            patient.sendall(head.encode() + body)
            done.append(parsed(received(patient))[0])

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.5)
    short = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert slow.ask("POST", "/v1/chat/completions", short)[0] == 200
    assert not done, "the long one was quicker"
    waiting.join()
    assert done == [200]


# --- thinking and calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 100])
def test_thinking_and_calls_are_told_apart_however_the_text_comes(size: int) -> None:
    """Also a call that cannot be read, whose words stay; and a stop word among them ends all."""
    machine = TextStateMachine(
        {
            "normal": [("<think>", "reasoning"), ("<call>", "tool")],
            "reasoning": [("</think>", "normal")],
            "tool": [("</call>", "normal")],
        }
    )
    context = SimpleNamespace(
        text_sm=machine, initial_state="normal", tool_parser=lambda text, _: json.loads(text)
    )
    call = '{"name": "clock", "arguments": {"zone": "CET"}}'

    def answered(text: str, stop: list[str], end: str = "stop") -> tuple[Piece, str | None]:
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        tokens = SimpleNamespace(stream=lambda: _Pieces(pieces))
        arguments = SimpleNamespace(stop_words=stop, logprobs=False)
        answer, whole = Answer(context, tokens, frozenset({-1}), arguments, [TOOL]), Piece()  # type: ignore[arg-type]
        ends = [(number, None) for number in range(len(pieces))] + [(-1, "stop")]
        ends[-2:] = ends[-2:] if end == "stop" else [(len(pieces) - 1, "length")]
        for token, finish in ends:
            whole.add(
                answer.take(
                    SimpleNamespace(token=token, finish_reason=finish, logprob=0.0, top_tokens=())
                )
            )
            if whole.finish is not None:
                break
        return whole, whole.finish

    said, finish = answered(f"<think>Hm.</think>It is <call>{call}</call>", [])
    assert (said.text, said.reasoning, finish) == ("It is ", "Hm.", "tool_calls")
    assert [one["function"]["name"] for one in said.calls] == ["clock"]
    assert json.loads(said.calls[0]["function"]["arguments"]) == {"zone": "CET"}
    said, finish = answered("A <call>torn", [], end="length")
    assert (said.text, said.calls, finish) == ("A torn", [], "length")
    no_calls = {f"A <call>{each}</call>": f"A {each}" for each in ("[1]", '{"name": "clock"}', "3")}
    for text, shown in {**no_calls, "a < b <thin": "a < b <thin"}.items():
        said, finish = answered(text, [])
        assert (said.text, said.calls, finish) == (shown, [], "stop")
    said, finish = answered("<think>Hm. Well.</think>Never", ["m. W"])
    assert (said.text, said.reasoning, finish) == ("", "H", "stop")


class _Pieces(TextStream):
    """Tokens that are numbers of pieces of a text."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def add(self, token: int) -> str:
        return self._pieces[token]

    def finish(self) -> str:
        return ""
