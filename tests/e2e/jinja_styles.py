"""Chat templates written for this test in the styles that checkpoints ship, and random chats to render with them."""
import random

TEMPLATES = {}

# One role per turn between markers; tools as JSON in the system turn; calls as JSON between tags.
TEMPLATES["chatml_json_tools"] = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You help.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\nsignatures in <tools></tools>:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content if message.content is string else message.content | tojson) + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Headers per turn, a date, tools in the first user turn, one call per message.
TEMPLATES["headers_with_date"] = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{#- The system text comes out of the list. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: notebook\\n" }}
{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code') | join(", ") + "\\n\\n"}}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "You may call these functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("no first user message to put tools into") }}
{%- endif %}
    {{- '<|start|>user<|end|>\\n\\n' -}}
    {{- "Answer with a call in JSON.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- '<|start|>assistant<|end|>\\n\\n' -}}
            {{- "<|py|>" + tool_call.name + ".call(" }}
            {%- for arg_name, arg_val in tool_call.arguments | items %}
                {{- arg_name + '="' ~ arg_val ~ '"' }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- endif %}
                {%- endfor %}
            {{- ")" }}
        {%- else  %}
            {{- '<|start|>assistant<|end|>\\n\\n' -}}
            {{- '{"name": "' + tool_call.name + '", ' }}
            {{- '"parameters": ' }}
            {{- tool_call.arguments | tojson }}
            {{- "}" }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

# Instruction brackets, strict alternation, tools before the last user turn.
TEMPLATES["inst_brackets"] = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- elif tools is not none %}
    {%- set parallel = "" if tools|length == 1 else "s" %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}

{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/TOOLS]" }}
            {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("ids have nine characters") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[RESULTS] {"content": ' + content|string + ", " }}
        {{- '"id": "' + (message.tool_call_id or 'none') + '"}[/RESULTS]' }}
    {%- else %}
        {{- raise_exception("only user and assistant roles, " ~ parallel) }}
    {%- endif %}
{%- endfor %}
"""

# A recursive macro writes types of schemas, as function-calling templates do.
TEMPLATES["schema_macro"] = """\
{%- macro to_type(spec) %}
{%- set names = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
{%- if names[spec.type] is defined %}
  {{- names[spec.type] }}
{%- elif spec.type == "array" %}
  {{- "list[" + to_type(spec['items']) + "]" }}
{%- elif spec.type == "object" %}
  {%- if spec.additionalProperties is defined %}
    {{- "dict[str, " + to_type(spec.additionalProperties) + ']' }}
  {%- else %}
    {{- "dict" }}
  {%- endif %}
{%- elif spec.type is iterable and spec.type is not string %}
  {{- "Union[" }}
  {%- for t in spec.type %}
    {{- to_type({"type": t}) }}
    {%- if not loop.last %}
      {{- "," }}
    {%- endif %}
  {%- endfor %}
  {{- "]" }}
{%- else %}
  {{- "Any" }}
{%- endif %}
{%- endmacro %}

{{- bos_token }}
{{- "<|im_start|>system\\nTools: <tools> " }}
{%- for tool in tools or [] %}
  {%- if tool.function is defined %}
    {%- set tool = tool.function %}
  {%- endif %}
  {{- '{"type": "function", "function": {"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
  {%- for name, fields in (tool.parameters.properties or {}) | items %}
    {{- name + ": " + to_type(fields) }}
    {%- if not loop.last %}
      {{- ", " }}
    {%- endif %}
  {%- endfor %}
  {{- ")" }}
  {%- if tool.return is defined %}
    {{- " -> " + to_type(tool.return) }}
  {%- endif %}
  {{- " - " + (tool.description or '') + "\\n\\n" }}
  {%- for name, fields in tool.parameters.properties | dictsort %}
    {%- if loop.first %}
      {{- "    Args:\\n" }}
    {%- endif %}
    {{- "        " + name + "(" + to_type(fields) + "): " + (fields.description | default('', true) | trim) }}
  {%- endfor %}
  {{- '"} }' }}
{%- endfor %}
{{- " </tools><|im_end|>\\n" }}
{%- for message in messages %}
  {%- if message.role == "tool" %}
    {%- if loop.previtem and loop.previtem.role != "tool" %}
      {{- "<|im_start|>tool\\n" }}
    {%- endif %}
    {{- "<tool_response>\\n" }}
    {{- message.content }}
    {%- if not loop.last %}
      {{- "\\n</tool_response>\\n" }}
    {%- else %}
      {{- "\\n</tool_response>" }}
    {%- endif %}
    {%- if not loop.last and loop.nextitem.role != "tool" %}
      {{- '<|im_end|>' }}
    {%- elif loop.last %}
      {{- '<|im_end|>' }}
    {%- endif %}
  {%- else %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
"""

# Thinking kept only after the last question; messages walked from the end.
TEMPLATES["thinking_tail"] = """\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system") %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# One line, flags in a namespace, everything glued.
TEMPLATES["flags_one_line"] = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='', is_first_sp=true) %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}"
    "{%- else %}{% set ns.system_prompt = ns.system_prompt + '\n\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system_prompt }}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<|User|>' ~ message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- set ns.is_tool = false -%}{%- for tool in message['tool_calls'] %}{%- if not ns.is_first %}"
    "{%- if message['content'] is none %}{{'<|Assistant|><|calls|><|call|>' + (tool['type'] or 'function') + '<|sep|>' + tool['function']['name'] + '\n' + '```json' + '\n' + tool['function']['arguments']|tojson + '\n' + '```' + '<|endcall|>'}}"
    "{%- else %}{{'<|Assistant|>' + message['content'] + '<|calls|>' + tool['function']['name'] + '\n' + tool['function']['arguments'] | string}}{%- endif %}{%- set ns.is_first = true -%}"
    "{%- else %}{{'\n' + '<|call|>' + tool['function']['name'] + '\n' + tool['function']['arguments'] | tojson}}{%- endif %}{%- endfor %}{{'<|endcalls|><|eos|>'}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and 'tool_calls' not in message %}{%- if ns.is_tool %}{{'<|outputs_end|>' ~ message['content'] ~ '<|eos|>'}}{%- set ns.is_tool = false -%}"
    "{%- else %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')|last %}{% endif %}{{'<|Assistant|>' + content + '<|eos|>'}}{%- endif %}{%- endif %}"
    "{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{%- if ns.is_output_first %}{{'<|outputs|><|output|>' + message['content'] + '<|endoutput|>'}}{%- set ns.is_output_first = false %}"
    "{%- else %}{{'<|output|>' + message['content'] + '<|endoutput|>'}}{%- endif %}{%- endif %}{%- endfor -%}{% if ns.is_tool %}{{'<|outputs_end|>'}}{% endif %}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|><think>\n'}}{% endif %}"
)

# Turns with a renamed role; the system text becomes a prefix; parts of content.
TEMPLATES["turns_with_parts"] = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if strict and (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- elif message['content'] is none -%}
        {{ '(empty)' }}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

# Parameters as XML-like elements, attributes of the schema written by a macro, {% generation %} around answers.
TEMPLATES["xml_tools"] = """\
{% macro render_extra_keys(json_dict, handled_keys) %}
    {%- if json_dict is mapping %}
        {%- for json_key in json_dict if json_key not in handled_keys %}
            {%- if json_dict[json_key] is mapping or (json_dict[json_key] is sequence and json_dict[json_key] is not string) %}
                {{- '\\n<' ~ json_key ~ '>' ~ (json_dict[json_key] | tojson | safe) ~ '</' ~ json_key ~ '>' }}
            {%- else %}
                {{-'\\n<' ~ json_key ~ '>' ~ (json_dict[json_key] | string) ~ '</' ~ json_key ~ '>' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{% endmacro %}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if tools is iterable and tools | length > 0 %}
    {{- "<tools>" }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}
            {%- set tool = tool.function %}
        {%- endif %}
        {{- "\\n<function>\\n<name>" ~ tool.name ~ "</name>" }}
        {%- if tool.description is defined %}
            {{- '\\n<description>' ~ (tool.description | trim) ~ '</description>' }}
        {%- endif %}
        {{- '\\n<parameters>' }}
        {%- if tool.parameters is defined and tool.parameters is mapping and tool.parameters.properties is defined and tool.parameters.properties is mapping %}
            {%- for param_name, param_fields in tool.parameters.properties|items %}
                {{- '\\n<parameter>' }}
                {{- '\\n<name>' ~ param_name ~ '</name>' }}
                {%- if param_fields.type is defined %}
                    {{- '\\n<type>' ~ (param_fields.type | string) ~ '</type>' }}
                {%- endif %}
                {%- set handled_keys = ['name', 'type', 'description'] %}
                {{- render_extra_keys(param_fields, handled_keys) }}
                {{- '\\n</parameter>' }}
            {%- endfor %}
        {%- endif %}
        {{- render_extra_keys(tool.parameters, ['type', 'properties']) }}
        {{- '\\n</parameters>' }}
        {{- '\\n</function>' }}
    {%- endfor %}
    {{- "\\n</tools>" }}
{%- endif %}
{%- for message in loop_messages %}
    {%- if message.role == "assistant" and message.tool_calls is defined and message.tool_calls is iterable and message.tool_calls | length > 0 %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
            {%- if tool_call.arguments is defined and tool_call.arguments is mapping %}
                {%- for args_name, args_value in tool_call.arguments|items %}
                    {{- '<parameter=' + args_name + '>\\n' }}
                    {%- set args_value = args_value | tojson | safe if args_value is mapping or (args_value is sequence and args_value is not string) else args_value | string %}
                    {{- args_value }}
                    {{- '\\n</parameter>\\n' }}
                {%- endfor %}
            {%- endif %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content ~ '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}
            {{- '<|im_start|>user\\n' }}
        {%- endif %}
        {{- '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>\\n' }}
        {%- if not loop.last and loop.nextitem.role != "tool" or loop.last %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {{- message.content }}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""

# White space left to the lexer: no dashes, trim_blocks and lstrip_blocks do the work.
TEMPLATES["plain_blocks"] = """\
{% for message in messages %}
    {% if message.role not in ['user', 'assistant', 'system'] %}
        {% continue %}
    {% endif %}
    {% set text %}
        {% if message.content is string %}{{ message.content|upper if loop.first else message.content }}
        {% else %}
{{ message.content | tojson }}
        {% endif %}
    {% endset %}
### {{ message.role | title }} ({{ loop.index }}/{{ loop.length }}):
{{ text | trim | indent(2, true) }}
    {# a note on a line of its own #}
    {% if loop.index > 6 %}
        {% break %}
    {% endif %}
{% else %}
nothing
{% endfor %}
{% filter replace('\\n', '|') %}
{% call(name, extra='x') listing(messages) %}
  <{{ name }}{{ extra }}>
{% endcall %}
{% endfilter %}
{% macro listing(ms) %}
{% for role, group in ms | groupby('role') %}
{{ role }}={{ group | length }}{{ caller(role) if caller }}
{% endfor %}
{% endmacro %}
"""
# The macro must stand before its use: move it to the front.
_cut = TEMPLATES["plain_blocks"].index("{% macro listing")
TEMPLATES["plain_blocks"] = TEMPLATES["plain_blocks"][_cut:] + TEMPLATES["plain_blocks"][:_cut]

WORDS = ["hello", "  padded ", "two\nlines", "é 🙂 中文", "<tag>&\"'", "</think>", "<think>\nhm\n</think>\n\nanswer", "", "x" * 40, "{{ no }}", "tab\there", "<tool_response>\nz\n</tool_response>"]


def _value(rnd, depth=2):
    k = rnd.randrange(9 if depth else 6)
    if k < 2:
        return rnd.choice(WORDS)
    if k == 2:
        return rnd.randrange(-1000, 1000)
    if k == 3:
        return rnd.choice([0.5, -1.25, 1e-7, 3.0, 1e20])
    if k == 4:
        return rnd.choice([True, False])
    if k == 5:
        return None
    if k == 6:
        return [_value(rnd, depth - 1) for _ in range(rnd.randrange(3))]
    return {rnd.choice(["a", "b", "city", "é", "items"]): _value(rnd, depth - 1) for _ in range(rnd.randrange(3))}


def _tool(rnd, i):
    props = {rnd.choice(["city", "n", "list", "opts", "é"]): {"type": rnd.choice(["string", "integer", "array", "object", ["string", "null"], "weird"]), "description": rnd.choice(WORDS),
                                                              "items": {"type": "number"}, "enum": ["a", "b"]} for _ in range(rnd.randrange(4))}
    fn = {"name": f"fn_{i}", "description": rnd.choice(WORDS), "parameters": {"type": "object", "properties": props, "required": list(props)[:1]}}
    if rnd.random() < 0.3:
        fn["return"] = {"type": "array", "items": {"type": "boolean"}}
    return {"type": "function", "function": fn}


def _call(rnd):
    return {"id": rnd.choice(["abcdefghi", "123456789", "short"]) if rnd.random() < 0.3 else "abcdefghi", "type": "function",
            "function": {"name": f"fn_{rnd.randrange(3)}", "arguments": {k: _value(rnd) for k in rnd.sample(["city", "n", "opts", "é"], rnd.randrange(3))}}}


def chat(rnd=random):
    """A request as a client would send it; now and then an odd one."""
    messages = []
    if rnd.random() < 0.6:
        messages.append({"role": "system", "content": rnd.choice(WORDS)})
    for _ in range(rnd.randrange(1, 4)):
        content = rnd.choice(WORDS) if rnd.random() < 0.85 else [{"type": "text", "text": rnd.choice(WORDS)}, {"type": "image"}]
        messages.append({"role": "user", "content": content})
        if rnd.random() < 0.4:
            messages.append({"role": "assistant", "content": rnd.choice([None, "", "let me see"]), "tool_calls": [_call(rnd) for _ in range(rnd.choice([1, 1, 2]))]})
            for _ in range(rnd.randrange(1, 3)):
                messages.append({"role": "tool", "content": rnd.choice(WORDS), "tool_call_id": "abcdefghi"})
        m = {"role": "assistant", "content": rnd.choice(WORDS)}
        if rnd.random() < 0.3:
            m["reasoning_content"] = rnd.choice(WORDS)
        messages.append(m)
    if rnd.random() < 0.7:
        messages.pop()
    out = {"messages": messages, "add_generation_prompt": rnd.random() < 0.7, "bos_token": "<s>", "eos_token": "</s>", "strict": rnd.random() < 0.3}
    if rnd.random() < 0.6:
        out["tools"] = [_tool(rnd, i) for i in range(rnd.randrange(1, 4))]
    elif rnd.random() < 0.5:
        out["tools"] = None
    if rnd.random() < 0.3:
        out["enable_thinking"] = rnd.random() < 0.5
    if rnd.random() < 0.2:
        out["builtin_tools"] = ["fn_0", "code"]
    return out
