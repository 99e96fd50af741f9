#!/usr/bin/env bash
# usage: demo.sh [QUESTION]
# Installs what is needed (Debian; nothing when it is there), builds nibble, lets the embedded model answer a question,
# quantizes it to NVFP4 with its draft head, looks at the result, checks it against its source and lets that answer too,
# compares both on word problems, measures draft heads side by side, and serves the export: one question with curl, one tool
# call through OpenAI's Python client.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh --minimal --client
make -s CC=gcc -j"$(nproc)" all
question=${1:-"Ada has 12 apples. Ben has 30 apples. How many apples do they have together?"}
show() { printf '\n$'; printf ' %q' "$@"; printf '\n'; "$@"; }
out=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2> /dev/null; rm -rf "$out"' EXIT
show build/nibble inspect assets/qwen36-tiny
show build/nibble run assets/qwen36-tiny --temperature 0 -p "$question"
show build/nibble quantize assets/qwen36-tiny -o "$out/qwen36-tiny-nvfp4" --samples 48
show build/nibble inspect "$out/qwen36-tiny-nvfp4" --scan
show build/nibble check "$out/qwen36-tiny-nvfp4" --source assets/qwen36-tiny
show build/nibble run "$out/qwen36-tiny-nvfp4" --temperature 0 -p "$question"
show build/nibble eval gsm8k assets/qwen36-tiny --no-think --limit 100 -q -o "$out/bf16.jsonl"
show build/nibble eval gsm8k "$out/qwen36-tiny-nvfp4" --no-think --limit 100 -q --compare "$out/bf16.jsonl"
show build/nibble eval ab --heads assets/qwen36-tiny --trunk "$out/qwen36-tiny-nvfp4" --samples 48 --limit 24 -n 64 -q

# The server says on standard error where it listens.
printf '\n$ build/nibble serve %q --port 0 &\n' "$out/qwen36-tiny-nvfp4"
build/nibble serve "$out/qwen36-tiny-nvfp4" --port 0 --log-format off 2> "$out/log" &
server=$!
url=
while [ -z "$url" ]; do
  kill -0 $server 2> /dev/null || { cat "$out/log" >&2; exit 4; }
  url=$(sed -n 's/^ready \(http.*\)$/\1/p' "$out/log")
  sleep 0.05
done
cat "$out/log"
.venv/bin/python -c 'import json, sys; print(json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}], "temperature": 0}))' \
  "$question" > "$out/body.json"
printf '\n$ curl %s -H "Content-Type: application/json" -d %q\n' "$url/v1/chat/completions" "@$out/body.json"
curl -sS --fail-with-body "$url/v1/chat/completions" -H 'Content-Type: application/json' -d "@$out/body.json" | tee "$out/answer"
printf '\n\n$ .venv/bin/python (openai.OpenAI(...).chat.completions.create(..., tools=[get_weather], reasoning_effort="none"))\n'
.venv/bin/python - "$url" "$out/answer" << 'END'
import json
import sys

import openai

url, answer = sys.argv[1:]
client = openai.OpenAI(base_url=url + "/v1", api_key="none")
tool = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
r = client.chat.completions.create(model=client.models.list().data[0].id, temperature=0, tools=[tool], reasoning_effort="none",
                                   messages=[{"role": "user", "content": "What is the weather in Paris?"}])
call = r.choices[0].message.tool_calls[0].function
print(f"{call.name}({call.arguments}), finish_reason {r.choices[0].finish_reason}")
with open(answer) as f:
    first = json.load(f)
def accept_length(usage):
    made = usage.get("speculative")  # absent when measured times spoke against drafts
    return "%.2f" % made["accept_length"] if made else "1.00 (no drafts)"


print("accept length: %s in the answer, %s in the tool call" % (accept_length(first["usage"]), accept_length(r.usage.model_dump())))
END
kill -TERM $server
wait $server
server=
echo "the server has ended"
