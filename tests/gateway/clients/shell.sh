#!/bin/sh
# An agent of curl and jq's smallest friends: python writes and reads JSON, curl asks.
query=$(python3 -c 'import json, sys; print(json.loads(sys.stdin.readline())["query"])')
messages=$(python3 -c 'import json, sys; print(json.dumps([{"role": "user", "content": sys.argv[1]}]))' "$query")
for number in 0 1 2; do
  body=$(python3 -c 'import json, sys; print(json.dumps({"messages": json.loads(sys.argv[1])}))' "$messages")
  answer=$(curl -s "$OPENAI_BASE_URL/chat/completions" -H "Content-Type: application/json" -d "$body") || exit 1
  messages=$(python3 - "$messages" "$answer" "$number" <<'END'
import json, sys
messages, answer = json.loads(sys.argv[1]), json.loads(sys.argv[2])["choices"][0]["message"]
print(json.dumps([*messages, answer, {"role": "user", "content": f"again {sys.argv[3]}"}]))
END
)
done
python3 -c 'import json, sys; print(json.loads(sys.argv[1])[-2]["content"])' "$messages"
