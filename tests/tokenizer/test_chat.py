"""Chat templates: message shapes (case C37), the Hugging Face dialect, the sandbox, errors."""

import re

import pytest

from jinfer.errors import RequestError, TokenizerError
from jinfer.tokenizer import ChatTemplate

PLAIN = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
         "{% if add_generation_prompt %}>{% endif %}")
USER = [{"role": "user", "content": "hi"}]


def test_text_parts_are_joined_in_order():
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    template = ChatTemplate(PLAIN)
    assert template.render([{"role": "user", "content": parts}]) == template.render(USER) == "[user]hi>"
    assert template.render([{"role": "user", "content": []}]) == "[user]>"
    assert template.render(USER, add_generation_prompt=False) == "[user]hi"


def test_assistant_without_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    template = ChatTemplate("{% for m in messages %}{{ m.content + '|' }}{{ m.tool_calls }}{% endfor %}")
    assert template.render([call]) == "|[{'function': {'name': 'f'}}]"
    answer = {"role": "assistant", "content": "x", "tool_calls": []}
    assert ChatTemplate(PLAIN).render([*USER, answer, *USER]) == "[user]hi[assistant]x[user]hi>"


@pytest.mark.parametrize(("messages", "field"), [
    ("hi", "messages"), ([], "messages"), ({"role": "user"}, "messages"), (["hi"], "messages[0]"),
    ([{"content": "hi"}], "messages[0].role"), ([{"role": "", "content": "hi"}], "messages[0].role"),
    ([{"role": "user", "content": None}], "messages[0].content"), ([{"role": "user"}], "messages[0].content"),
    ([*USER, {"role": "user", "content": 3}], "messages[1].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
     "messages[0].content[0].type"),
    ([{"role": "user", "content": ["hi"]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
])
def test_malformed_messages_name_the_field(messages, field):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(PLAIN).render(messages)
    assert caught.value.field == field


def test_messages_are_not_changed():
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    ChatTemplate(PLAIN).render([message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "hi"}]}


def test_hugging_face_dialect():
    source = """{% for m in messages %}
    {% if loop.index > 2 %}{% break %}{% endif %}
{% generation %}
{{ m.content }}{% endgeneration %}
{% endfor %}
{{ {"a": "<é>"} | tojson }}{{ bos_token }}{{ tools is none }}{{ extra }}"""
    template = ChatTemplate(source, {"bos_token": "<s>"})
    # Blocks take their line break and indentation with them; tojson keeps HTML and non-ASCII characters.
    assert template.render(USER * 3, extra="!") == 'hihi{"a": "<é>"}<s>True!'
    assert ChatTemplate("{{ x | tojson(indent=2) }}").render(USER, x={"k": 1}) == '{\n  "k": 1\n}'
    assert re.fullmatch(r"\d{4}", ChatTemplate("{{ strftime_now('%Y') }}").render(USER))


def test_keywords_override_variables():
    assert ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"}).render(USER, bos_token="<b>") == "<b>"


def test_tool_template_is_chosen_when_tools_are_given():
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"})
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{"name": "f"}]) == "f"


def test_errors_are_one_line():
    with pytest.raises(TokenizerError, match="chat template: only user messages"):
        ChatTemplate("{{ raise_exception('only user\n messages') }}").render(USER)
    with pytest.raises(TokenizerError, match="chat template 'default', line 2"):
        ChatTemplate("\n{% if %}")
    with pytest.raises(TokenizerError, match="chat template: "):
        ChatTemplate("{{ messages[0].content + 1 }}").render(USER)
    with pytest.raises(TokenizerError, match="chat template: none given"):
        ChatTemplate({})


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append({}) }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% for i in range(10000000) %}x{% endfor %}",
])
def test_templates_are_sandboxed(source):
    with pytest.raises(TokenizerError):
        ChatTemplate(source).render(USER)
