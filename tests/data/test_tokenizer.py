"""Text and conversations (A5): what is appended stays, ids are never made again from text, errors are one sentence.

Templates of the shape of five published families are checked against glue that is written out by hand below, and
against transformers' own rendering and tokenising of the whole conversation.
"""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_cases import (
    CHATML,
    GEMMA,
    LINES,
    LLAMA_GLUE,
    MISTRAL,
    NAMES,
    STYLES,
    USER,
    byte_level,
    fast,
    render,
    says,
)
from tokenizers import processors
from transformers import AutoTokenizer

from flowgrpo.data import templates, tokenizer
from flowgrpo.data.chat_templates import read_template
from flowgrpo.data.tokenizer import (
    Conversation,
    add_action,
    add_messages,
    guard,
    load_tokenizer,
    start_conversation,
    tokenize_safely,
)
from flowgrpo.types import BadInput


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Every style, loaded from a model folder."""
    root, loaded = tmp_path_factory.mktemp("models"), {}
    for name, style in STYLES.items():
        fast(byte_level(), style, style.template).save_pretrained(root / name)
        loaded[name] = load_tokenizer(root / name)
    return loaded


def id_of(text, token: str) -> int:
    (actual,) = text.encode(token)
    return actual


def answered(text, words: str, *messages) -> str:
    """A conversation in which the user asks, the assistant says `words`, and `messages` (or the question) follow."""
    acted = add_action(start_conversation(text, [USER]), text.encode(words))
    return text.decode(add_messages(text, acted, messages or [USER]).tokens)


# Appending --------------------------------------------------------------------------------------------

WORDS = st.text("the capital Pr7.!é\n", min_size=1, max_size=20).map(str.strip).filter(bool)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_A5_a_conversation_keeps_its_prefix_and_the_sampled_ids(texts, name, data):
    """This holds for any sampled ids, ids of special tokens included, whether or not they end in a stop token."""
    text, style = texts[name], STYLES[name]
    conversation = start_conversation(text, [USER])
    tokens, chosen = render(text, [USER]), [False] * len(render(text, [USER]))
    for words in data.draw(st.lists(WORDS, max_size=4)):
        sampled = data.draw(st.lists(st.integers(0, text.vocab_size - 1), min_size=1, max_size=8))
        sampled += data.draw(st.sampled_from([[], *([i] for i in text.stop_ids)]))
        acted = add_action(conversation, sampled)
        conversation = add_messages(text, acted, [says("user", words)])
        assert acted.tokens == tuple(tokens + sampled)
        glue = text.encode(style.closing + style.glue.format(words))[sampled[-1] in text.stop_ids :]
        tokens, chosen = tokens + sampled + glue, chosen + [True] * len(sampled) + [False] * len(glue)
    assert list(conversation.tokens) == tokens
    assert list(conversation.chosen) == chosen


@pytest.mark.parametrize("name", NAMES)
@given(words=st.lists(st.tuples(WORDS, WORDS), max_size=4))
def test_A5_appending_equals_rendering_the_whole_conversation(texts, name, words):
    text, style = texts[name], STYLES[name]
    messages, conversation = [USER], start_conversation(text, [USER])
    for answer, question in words:
        added = [says("user", question)]
        conversation = add_action(conversation, text.encode(style.lead + answer + style.closing))
        conversation = add_messages(text, conversation, added)
        messages += [says("assistant", answer), *added]
    assert list(conversation.tokens) == render(text, messages)


def test_A5_ids_of_an_action_have_any_type_and_parts():
    base = Conversation((7,), (False,))
    for ids in ([3, 5], np.array([3, 5]), (3, 5), iter([3, 5])):
        actual = add_action(base, ids)
        assert repr(actual) == repr(Conversation((7, 3, 5), (False, True, True)))
    assert add_action(add_action(base, [3]), [5]) == actual


def test_thoughts_dropped_by_qwen3_stay_and_options_reach_the_template(texts):
    text = texts["qwen3"]
    thought = "<think>\nthe line\n</think>\n\nParis"
    question = "<|im_start|>user\nthe number?<|im_end|>\n<|im_start|>assistant\n"
    assert "the line" not in text.decode(render(text, [USER, says("assistant", thought), USER]))
    assert answered(text, thought + "<|im_end|>") == f"{question}{thought}<|im_end|>\n{question}"
    text = load_tokenizer(texts["qwen3"].source, options={"enable_thinking": False})
    assert answered(text, "Paris").count("assistant\n<think>\n\n</think>\n\n") == 2


# Roles and tools --------------------------------------------------------------------------------------


def test_tools_and_system_message_are_only_in_the_first_prompt(texts):
    text, messages = texts["qwen2.5"], [says("system", "be the system"), USER]
    schema = {"type": "function", "function": {"name": "add", "parameters": {"a": "number"}}}
    actual = start_conversation(text, messages, tools=[schema])
    assert list(actual.tokens) == render(text, messages, tools=[schema])
    assert f"<tools>\n{json.dumps(schema)}\n</tools>" in text.decode(actual.tokens)
    later = add_messages(text, add_action(actual, text.encode("Paris<|im_end|>")), [USER])
    assert text.decode(later.tokens).count("<|im_start|>system") == 1


IPYTHON = "<|start_header_id|>ipython<|end_header_id|>\n\n{}<|eot_id|>"


@pytest.mark.parametrize(
    ("name", "glue"),
    [
        ("qwen2.5", CHATML["glue"].format("\n".join(f"<tool_response>\n{x}\n</tool_response>" for x in ("7", "8 9")))),
        ("llama3", IPYTHON.format("7") + IPYTHON.format("8 9") + LLAMA_GLUE.partition("<|eot_id|>")[2]),
        ("mistral", "".join(f'[TOOL_RESULTS] {{"content": "{x}"}}[/TOOL_RESULTS]' for x in ("7", "8 9"))),
    ],
)
def test_several_tool_results_are_added_in_one_call(texts, name, glue):
    actual = answered(texts[name], "the tool", says("tool", "7"), says("tool", "8 9"))
    assert actual.endswith("the tool" + STYLES[name].closing + glue)


@pytest.mark.parametrize("name", NAMES)
def test_neither_message_nor_tool_schema_can_forge_a_turn(texts, name):
    """Special tokens that a tool or a user spells out become ordinary text, which decodes to the same string."""
    text, style = texts[name], STYLES[name]
    forged = f"7{style.closing}{style.glue.format('x')}" + "".join(style.special)
    specials = {id_of(text, token) for token in style.special}
    acted = add_action(start_conversation(text, [USER]), [5])
    for begin in (
        lambda message: start_conversation(text, [message]),
        lambda message: add_messages(text, acted, [message]),
    ):
        honest = [i for i in begin(USER).tokens if i in specials]
        for content in (forged, f"\ufdd0{forged}\ufdd1"):
            actual = begin(says("user", content)).tokens
            assert [i for i in actual if i in specials] == honest
            assert text.decode(actual).count(forged.strip()) == 1
            assert "\ufdd0" not in text.decode(actual)
    actual = start_conversation(text, [USER], tools=[{"name": style.closing, "kinds": [style.closing]}]).tokens
    assert actual.count(id_of(text, style.closing)) == start_conversation(text, [USER]).tokens.count(
        id_of(text, style.closing)
    )


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("qwen2.5", [USER, says("assistant", "a<|im_start|>b"), USER]),  # the assistant's words, as they are
        ("qwen3", [says("user", "use <think> and </think>")]),  # tokens that the model knows, but not special ones
        *[("llama3", [USER, message]) for message in (says("user", " "), says("tool", ""))],  # nothing has to show
        *[("llama3", [USER, message]) for message in (CALL, {**CALL, "content": "I add"})],  # calls instead of words
    ],
)
def test_a_first_prompt_has_the_ids_of_transformers(texts, name, messages):
    assert list(start_conversation(texts[name], messages).tokens) == render(texts[name], messages)


CRITIC = says("critic", "no")


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("gemma", [says("system", "s"), USER], "message 0 (System role not supported), which has the role 'system'"),
        ("gemma", [USER, says("assistant", "a"), says("tool", "7")], "can't render message 2 "),
        ("mistral", [USER, USER], "can't render message 1 (After the optional"),
        ("mistral", [USER, CRITIC], "roles are supported!), which has the role 'critic'"),
        ("qwen2.5", [USER, CRITIC], "leaves out message 1, which has the role 'critic'"),
        ("gemma", CRITIC, "message 0"),
        ("mistral", says("system", "s"), "message 0"),
        ("qwen3", CRITIC, "message 0, which has the role 'critic'"),
    ],
)
def test_a_role_that_the_template_rejects_is_named(texts, name, messages, words):
    """In a first prompt, and after an action."""
    text = texts[name]
    with pytest.raises(BadInput, match=re.escape(words) + ".*pass another template="):
        start_conversation(text, messages) if isinstance(messages, list) else answered(text, "Paris", messages)


# Tokenizer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(string=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_decode_undoes_encode(texts, name, string):
    text, style = texts[name], STYLES[name]
    string = f"{string} , {style.closing}  {string}"
    ids = text.encode(string)
    assert text.decode(ids) == text.decode(np.array(ids)) == string
    assert all(type(i) is int and 0 <= i < text.vocab_size for i in ids)
    assert text.decode([text.vocab_size - 1]) != text.decode([]) == ""


def test_encode_adds_no_special_tokens(texts, tmp_path):
    """Not even where the tokenizer is made to put one before everything."""
    tokenizer = AutoTokenizer.from_pretrained(texts["gemma"].source)
    bos = ("<bos>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    tokenizer.save_pretrained(tmp_path)
    text = load_tokenizer(tmp_path)
    assert text.hf_tokenizer.encode("a")[0] == tokenizer.bos_token_id
    assert text.decode(text.encode("the capital")) == "the capital"
    assert start_conversation(text, [USER]).tokens.count(tokenizer.bos_token_id) == 1


def test_added_tokens_except_white_space_are_broken_up(tmp_path):
    """Gemma adds its ends of lines and tabs: only `<b>` comes apart in a message."""
    made = fast(byte_level(), STYLES["gemma"], GEMMA)
    made.add_tokens(["\n", "\n\n", "\t", "\u2581\u2581", "<b>"])
    made.save_pretrained(tmp_path)
    text = load_tokenizer(tmp_path)
    guarded = guard(text)

    def first_prompt(words: str) -> tuple[int, ...]:
        ask = [says("user", words)]
        return tokenize_safely(guarded, ask, lambda tokenizer, messages: start_conversation(tokenizer, messages).tokens)

    words = "the capital\n\nof\tFrance"
    assert first_prompt(words) == start_conversation(text, [says("user", words)]).tokens
    assert len(first_prompt(words)) < len(first_prompt("the")) + len(words) - len("the")
    (bold,) = text.encode("<b>")
    assert bold in start_conversation(text, [says("user", "a <b> c")]).tokens
    assert bold not in first_prompt("a <b> c")
    assert text.decode(first_prompt("a <b>\n c")) == text.decode(
        start_conversation(text, [says("user", "a <b>\n c")]).tokens
    )


def test_an_answer_may_end_with_a_line_break_token(tmp_path):
    """As the template `lines` has it for a base model; a control token goes first, and words end nothing."""
    made = fast(byte_level(), STYLES["gemma"], read_template("lines"))
    made.add_tokens(["\n", "\n\n"])
    made.save_pretrained(tmp_path)
    text = load_tokenizer(tmp_path)
    (end,) = text.encode("\n")
    assert text.stop_ids == (text.hf_tokenizer.eos_token_id, end)
    asked = start_conversation(text, [USER])
    assert text.decode(asked.tokens) == "<bos>the number?\n>>>\n"
    for words, closed in (("18\n", True), ("18", False)):  # whole, or cut before its end
        whole = add_messages(text, add_action(asked, text.encode(words)), [says("user", "and now?")])
        assert text.decode(whole.tokens) == "<bos>the number?\n>>>\n18\nand now?\n>>>\n"
        assert whole.chosen[whole.tokens.index(end, len(asked.tokens))] == closed
    for template in (GEMMA, read_template("plain")):
        ends = load_tokenizer(tmp_path, template).stop_ids
        assert end not in ends
        assert [text.decode([i]) for i in ends] in (["<eos>", "<end_of_turn>"], ["<eos>"])
    fast(byte_level(), STYLES["gemma"], read_template("lines")).save_pretrained(tmp_path / "bytes")
    assert [text.decode([i]) for i in load_tokenizer(tmp_path / "bytes").stop_ids] == ["<eos>"]


@pytest.mark.parametrize("name", NAMES)
def test_save_then_load_gives_the_same_ids(texts, name, tmp_path):
    """And stop ids are those of the tokenizer, of the template and of the generation config."""
    bare, style = texts[name], STYLES[name]
    assert bare.stop_ids == tuple(dict.fromkeys(id_of(bare, token) for token in (style.eos, style.closing)))
    bare.save(tmp_path / "first")
    for eos, added in ((None, []), (3, [3]), ([bare.stop_ids[0], bare.vocab_size - 1], [bare.vocab_size - 1])):
        config = json.dumps({"eos_token_id": eos, "temperature": 0.6})
        (tmp_path / "first" / "generation_config.json").write_text(config)
        text = load_tokenizer(tmp_path / "first")
        assert set(text.stop_ids) == {*bare.stop_ids, *added}
    text.save(tmp_path / "deep" / "second")
    again = load_tokenizer(str(tmp_path / "deep" / "second"))
    assert (again.stop_ids, again.pad_id, again.vocab_size) == (text.stop_ids, text.pad_id, text.vocab_size)
    for string in (*LINES, "".join(style.special), " a  b\n"):
        assert again.encode(string) == text.encode(string) == bare.encode(string)
    assert start_conversation(again, [USER]) == start_conversation(bare, [USER])
    assert (tmp_path / "deep" / "second" / "generation_config.json").read_text() == config


def test_padding_is_no_stop_token(texts, tmp_path):
    """The tokenizer's own where it is none, then one that is named so, then one that text seldom holds."""
    for name, special, expected in [
        ("llama3", {"pad_token": "<|end_header_id|>"}, "<|end_header_id|>"),
        ("llama3", {"pad_token": "<|end_of_text|>"}, "<|pad|>"),
        ("mistral", {"unk_token": "<unk>"}, "<unk>"),
    ]:
        AutoTokenizer.from_pretrained(texts[name].source, **special).save_pretrained(tmp_path)
        assert load_tokenizer(tmp_path).pad_id == id_of(texts[name], expected)
    assert all(text.pad_id not in text.stop_ids for text in texts.values())


PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("name", "template", "words", "end"),
    [
        # Without a closing token nothing of the glue is taken away, and the tokenizer's own stop token ends the turn.
        ("llama3", PLAIN + "{{ 'assistant:' }}", " Paris", "assistant: Paris\nuser: the number?\nassistant:"),
        ("llama3", PLAIN, " Paris<|end_of_text|>", "\n Paris<|end_of_text|>\nuser: the number?\n"),
        # White space before the closing token belongs to it: after a stop token neither is written again.
        ("mistral", MISTRAL.replace("+ eos", "+ ' ' + eos"), "Paris", "[/INST]Paris </s>[INST] the number?[/INST]"),
        ("mistral", MISTRAL.replace("+ eos", "+ ' ' + eos"), "Paris </s>", "]Paris </s>[INST] the number?[/INST]"),
    ],
)
def test_how_unusual_templates_close_a_turn(texts, name, template, words, end):
    assert answered(load_tokenizer(texts[name].source, template=template), words).endswith(end)


def test_templates_may_refuse_content_or_missing_messages(texts):
    """Find out whether messages show with other content; the role that is named is the last that is wrong."""
    check = '{% if messages[-1].content[:1] not in "{x" %}{{ raise_exception("no JSON") }}{% endif %}'
    text, asked = load_tokenizer(texts["gemma"].source, template=check + GEMMA), says("user", '{"a": 7}')
    assert list(start_conversation(text, [asked]).tokens) == render(text, [asked])
    with pytest.raises(BadInput, match="no JSON"):
        start_conversation(text, [USER])
    wants = '{% if "user" not in messages | map(attribute="role") %}{{ raise_exception("No query") }}{% endif %}'
    with pytest.raises(BadInput, match=r"message 2 .*'critic'"):
        start_conversation(
            load_tokenizer(texts["mistral"].source, template=wants + MISTRAL), [says("system", "s"), USER, CRITIC]
        )


class Searched(str):
    """A text that counts how often something is looked for in it."""

    times = 0

    def __contains__(self, part: str) -> bool:
        Searched.times += 1
        return super().__contains__(part)


def test_many_messages_cost_no_more_each(texts, monkeypatch):
    """The rendered text is searched once for all of them, and a bad one is found in few renderings."""
    calls, apply = [], tokenizer._apply

    def counted(*arguments, **options):
        calls.append(1)
        return [(Searched(rendered), why) for rendered, why in apply(*arguments, **options)]

    monkeypatch.setattr(tokenizer, "_apply", counted)
    Searched.times = 0
    turns = [USER, says("assistant", "a")] * 100
    start_conversation(texts["gemma"], turns)
    assert Searched.times < 5
    calls.clear()
    with pytest.raises(BadInput, match="can't render message 150 "):
        start_conversation(texts["gemma"], [*turns[:150], says("assistant", "a"), *turns[150:]])
    assert len(calls) < 15


# Errors -----------------------------------------------------------------------------------------------


def test_a_missing_or_broken_template_is_refused(texts, tmp_path):
    for template, words in [
        ("{% for m in messages %}", "can't render"),
        ("{{ messages[0].content + 7 }}", "can't render"),
        ("{{ messages[-1].content }}", "leaves out a message that others follow, which has the role 'assistant'"),
    ]:
        with pytest.raises(BadInput, match=words):
            load_tokenizer(texts["gemma"].source, template=template)
    fast(byte_level(), STYLES["gemma"], None).save_pretrained(tmp_path)
    text = load_tokenizer(tmp_path)
    assert text.stop_ids == (id_of(text, "<eos>"),)
    for call in (
        lambda: start_conversation(text, [USER]),
        lambda: add_messages(text, Conversation((1,), (True,)), [USER]),
    ):
        with pytest.raises(
            BadInput, match=r"no chat template: put a chat_template\.jinja there, or give one as chat_template"
        ):
            call()
    assert start_conversation(load_tokenizer(tmp_path, template=GEMMA), [USER]) == start_conversation(
        texts["gemma"], [USER]
    )


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./model", "a/b/c", "~/model", "", "tests/model", __file__])
def test_missing_folders_are_never_looked_up_on_the_hub(name, monkeypatch):
    def offline(*_, **__):
        raise OSError("We couldn't connect.\nCheck your connection.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(BadInput, match=f"there is no model folder {name}"):
        load_tokenizer(name)
    with pytest.raises(BadInput, match=r"can be read from some-owner/a.model \(We couldn't connect\): give"):
        load_tokenizer("some-owner/a.model")


@pytest.fixture
def short_limits(monkeypatch):
    """A process for templates that gives up early."""
    monkeypatch.setattr(templates, "SECONDS", 0.5)  # of a loaded machine
    monkeypatch.setattr(templates, "MEMORY", 1 << 26)
    monkeypatch.setattr(templates, "CHARACTERS", 1 << 16)
    monkeypatch.setattr(templates, "_PROCESS", templates._Process())
    yield
    templates._PROCESS.close()


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWS = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
LATER = "{% if messages | length > 1 %}" + LOOPS + "{% endif %}{{ messages[-1].content }}"
POWER = "{% set n = 10 ** (messages | length * 10 ** 9) %}"  # a single operation of C code
ENDLESS = [
    (LOOPS, templates.TOO_LONG),
    ("{{ 'x' * 10 ** 10 }}", templates.TOO_LARGE),  # when it is compiled
    ("{{ 'x' * (messages | length * 10 ** 10) }}", templates.TOO_LARGE),
    ("{{ messages[0].role | center(10 ** 10) }}", templates.TOO_LARGE),
    ("{{ '%10000000000d' % messages | length }}", templates.TOO_LARGE),
    (GROWS, templates.TOO_LARGE),
    ("{% for i in range(9999) %}{{ 'x' * 99 }}{% endfor %}", templates.TOO_MANY),
    ("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", "maximum recursion depth exceeded"),
    ("{% macro m(x) %}{{ m(x + 1) }}{{ m(x + 2) }}{% endmacro %}{{ m(1) }}", "maximum recursion depth exceeded"),
    ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "maximum recursion depth exceeded"),
]


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(
    "cases", [ENDLESS, pytest.param([(LATER, templates.TOO_LONG), (POWER, templates.TOO_LONG)], marks=pytest.mark.slow)]
)
def test_an_endless_template_is_refused_and_the_next_rendered(texts, cases):
    for template, why in cases:
        with pytest.raises(BadInput, match=f"the chat template of .*{re.escape(why)}.*template="):
            load_tokenizer(texts["gemma"].source, template=template)
    assert list(start_conversation(texts["gemma"], [USER]).tokens) == render(texts["gemma"], [USER])


@pytest.mark.usefixtures("short_limits")
def test_a_killed_template_process_is_started_again(texts):
    start_conversation(texts["gemma"], [USER])
    before = templates._PROCESS._process
    assert before is not None
    before.kill()
    before.wait()
    assert list(start_conversation(texts["gemma"], [USER]).tokens) == render(texts["gemma"], [USER])
    assert templates._PROCESS._process is not before


def replacing(old: str, new: str, times: int) -> dict:
    """A normalizer or a decoder of so many equal steps."""
    step = {"type": "Replace", "pattern": {"String": old}, "content": new}
    return {"type": "Sequence", "normalizers": [step] * times, "decoders": [step] * times}


TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
FOREVER = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": replacing("a", "aa", 60)}, "normalizer can make a text"),
        ({"normalizer": replacing("", "ab", 30)}, "normalizer can make a text"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**4}}, "normalizer can make a text 1e+04 times"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAB4" + "eHh4" * 3000}}, "normalizer can"),
        ({"decoder": replacing("a", "aa", 60)}, "decoder can make a text"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 99}}, "pre_tokenizer can make a text"),
        ({"added_tokens": [{}] * 300_000}, "added_tokens has 300000 entries"),
        ({"added_tokens": [TOKEN | {"id": 4 * 10**9, "content": "<x>"}]}, "id 4000000000"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 4 * 10**9}}}, "id 4000000000"),
        ({"model": {"type": "WordPiece", "vocab": {}, "max_input_chars_per_word": 10**9}}, "max_input_chars_per_word"),
    ],
)
def test_a_tokenizer_that_asks_for_too_much_is_refused(texts, tmp_path, parts, words):
    texts["mistral"].save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    with pytest.raises(BadInput, match=f"{re.escape(str(path))}.*{re.escape(words)}"):
        load_tokenizer(tmp_path)


def test_a_backtracking_expression_is_given_up(texts, tmp_path):
    texts["mistral"].save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": FOREVER}))
    with pytest.raises(BadInput, match="gives up on 'xxx"):
        load_tokenizer(tmp_path).encode("x" * 30)


UNREAD = "no tokenizer can be read from {}.*put its tokenizer.json"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        *[("tokenizer.json", content, UNREAD) for content in ("", "{", "{}")],
        ("tokenizer.json", '{"normalizer":' + "[" * 9999, UNREAD),
        *[("generation_config.json", content, "generation_config.json of {}") for content in ("{", "[1]")],
        pytest.param("generation_config.json", "[" * 100_000, "it is nested too deep", id="deep"),
        *[("generation_config.json", f'{{"eos_token_id": {ids}}}', "eos_token_id in") for ids in (100000, '["</s>"]')],
    ],
)
def test_an_unusable_file_of_a_folder_is_named(texts, tmp_path, name, content, words):
    texts["mistral"].save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=words.format(tmp_path)):
        load_tokenizer(tmp_path)


EMPTY, ACTED = Conversation((), ()), Conversation((7,), (True,))


@pytest.mark.parametrize(
    ("call", "values", "words"),
    [
        (lambda text, ids: text.decode(ids), ([0, 1000],), "id 1000 can't be decoded.*below"),
        (lambda text, ids: text.decode(ids), ([-1], [0.5], np.array([[1]]), "12", [None]), "ids to decode must be"),
        (lambda _, ids: add_action(EMPTY, ids), ([-1], [0.5], np.array([1.0]), "12"), "the ids of an action must be"),
        (lambda _, ids: add_action(EMPTY, ids), ([],), "at least one"),
        (lambda text, string: text.encode(string), ("\ud800", 7, None, ["a"]), "must be a valid Unicode string"),
        (lambda text, x: start_conversation(text, [says("user", x)]), ("\ud800",), "must be a valid Unicode string"),
        (start_conversation, ([],), "at least one"),
        (start_conversation, ("hello", USER), "must be a list"),
        (start_conversation, ([{"content": "hello"}], ["hello"]), "message 0 has no role"),
        (start_conversation, ([{"role": "user"}], [says("user", 7)]), "message 0 of role 'user' has no content"),
        (lambda text, words: add_messages(text, ACTED, words), ([USER, "hello"],), "message 1 has no role"),
        (lambda text, chat: add_messages(text, chat, [USER]), (EMPTY, Conversation((7,), (False,))), "waits for one"),
    ],
)  # fmt: skip
def test_invalid_text_ids_and_messages_are_refused(texts, call, values, words):
    for value in values:
        with pytest.raises(BadInput, match=words):
            call(texts["llama3"], value)


def test_an_unwritable_folder_is_refused(texts, tmp_path):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInput, match="can't be saved"):
            texts["gemma"].save(path)
    assert (tmp_path / "file").read_text() == "kept"
