"""The tokenizer wrapper: loading, its errors, and the texts and bytes of single tokens."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path

import pytest
import transformers as tf
from scripted_engine import make_hf_tokenizer

from llmc.errors import CheckpointError, InvalidRequestError
from llmc.text.tokenizer import Tokenizer
from llmc.text.tokenizer_packages import missing_packages


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(make_hf_tokenizer())


def test_loads_a_saved_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.hf.save_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    text = "h\u00e9llo <s> world"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text), skip_special_tokens=False) == text
    assert loaded.eos_token_id == 1
    assert loaded.chat_template is not None


def test_a_vendors_wrapper_is_not_used(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AutoTokenizer returns where mistral-common is installed and there is a tekken.json."""
    tokenizer.hf.save_pretrained(tmp_path)

    class Wrapper(tf.PreTrainedTokenizerBase):  # type: ignore[misc]
        def added_tokens_decoder(self) -> None:
            raise NotImplementedError

    monkeypatch.setattr(tf.AutoTokenizer, "from_pretrained", lambda *_, **__: Wrapper())
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("hello world") == tokenizer.encode("hello world")
    assert loaded.backend is not None and loaded.chat_template is not None


def test_missing_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer.*token ids"):
        Tokenizer.load(tmp_path)


def test_broken_tokenizer_names_the_directory(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


def test_an_error_of_several_lines_is_told_whole(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value) and not str(caught.value).endswith(":")


def test_a_sentencepiece_model_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask for tiktoken, which doesn't help."""
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    monkeypatch.setattr("llmc.text.tokenizer_packages._is_installed", lambda package: False)
    with pytest.raises(CheckpointError, match="tokenizer.model.*pip install sentencepiece"):
        Tokenizer.load(tmp_path)


def test_a_chat_template_that_lies_with_the_processor(tmp_path: Path) -> None:
    make_hf_tokenizer(None).save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    assert Tokenizer.load(tmp_path).chat_template == "{{ messages }}"
    (tmp_path / "chat_template.json").write_text("[")
    assert Tokenizer.load(tmp_path).chat_template is None


def test_code_of_the_checkpoint_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["planted.Planted", null]}, "tokenizer_class": "Planted"}'
    )
    (tmp_path / "planted.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Planted: ...\n"
    )
    with pytest.raises(CheckpointError):
        Tokenizer.load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_truncation_of_the_checkpoint_is_off(tmp_path: Path) -> None:
    hf = make_hf_tokenizer()
    hf.backend_tokenizer.enable_truncation(4)
    assert len(Tokenizer(hf).encode("a longer text than that")) > 4


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D800"):
        tokenizer.encode("a\ud800b")


def test_bytes_of_partial_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f642")
    assert len(ids) == 4
    assert tokenizer.token_text(ids[0]) == "\ufffd"
    assert b"".join(tokenizer.token_bytes(i) or b"" for i in ids).decode() == "\U0001f642"


def test_settings_of_the_isolated_copy_stay_there(tokenizer: Tokenizer) -> None:
    with tokenizer.isolated() as hf:
        hf.backend_tokenizer.encode_special_tokens = True  # as sanitizing a chat does for a moment
        assert len(hf.backend_tokenizer.encode("<s>").ids) > 1
        assert tokenizer.encode("<s>") == [0]


def test_ids_beyond_the_tokenizer_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([399, *tokenizer.encode("ok"), 100_000]) == "ok"
    assert tokenizer.token_text(399) == ""


def test_decoding_many_tokens_does_not_stop_other_threads(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("hello world ") * 100_000
    num_turns, has_ended = 0, threading.Event()

    def count() -> None:
        nonlocal num_turns
        while not has_ended.wait(0.001):
            num_turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = num_turns
    text = tokenizer.decode(tokens)
    meanwhile = num_turns - before
    has_ended.set()
    thread.join()
    assert text == "hello world " * 100_000
    assert meanwhile >= 2


def test_what_a_caller_switches_is_the_callers_alone(tokenizer: Tokenizer) -> None:
    before = tokenizer.encode("hello world hello")
    theirs = tokenizer.for_callers
    assert len(theirs("hello world hello", truncation=True, max_length=2).input_ids) == 2
    assert tokenizer.encode("hello world hello") == before and len(before) > 2


def write_tekken(folder: Path) -> None:
    """A tekken.json with every byte as a token after the special ones."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    content = {
        "config": {
            "pattern": r"\s*\S+",
            "default_vocab_size": 262,
            "default_num_special_tokens": 6,
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None}
            for i in range(256)
        ],
        "special_tokens": [
            {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(special)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(content))


def test_a_tekken_file_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its texts begin with BOS, as the vendor's package encodes them, which also has a template."""
    write_tekken(tmp_path)
    for loaded in (Tokenizer.load(tmp_path), Tokenizer.load(tmp_path)):
        assert loaded.encode("hi") == [1, *(6 + byte for byte in b"hi")]
        assert loaded.encode("<s>hi", add_special_tokens=False)[0] == 1
        assert (loaded.bos_token_id, loaded.eos_token_id, loaded.size) == (1, 2, 262)
        assert loaded.decode([1, 6 + ord("h"), 2]) == "h"
    if missing_packages(tmp_path)[1]:
        assert "has no chat template; install mistral-common" in caplog.text


def test_the_template_that_a_vendors_wrapper_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tokenizer.json, the wrapper saves one, and the template with it."""
    write_tekken(tmp_path)
    plain = tf.PreTrainedTokenizerFast.from_pretrained(
        tmp_path, bos_token="<s>", eos_token="</s>", chat_template="{{ messages[0].content }}"
    )

    class Wrapper(tf.PreTrainedTokenizerBase):  # type: ignore[misc]
        def save_pretrained(self, folder: str, save_format: str) -> None:
            assert save_format == "hf"
            plain.save_pretrained(folder)

    monkeypatch.setattr(tf.AutoTokenizer, "from_pretrained", lambda *_, **__: Wrapper())
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("h") == [1, 6 + ord("h")]
    assert loaded.render([{"role": "user", "content": "hi"}]) == "hi"
