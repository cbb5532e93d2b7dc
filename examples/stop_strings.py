"""End a text at a stop string, even if the string starts or ends within a token.

Prints the finish reason, the stop string and the streamed pieces for several settings. No piece contains a
part of the stop string, unless it is included.

python examples/stop_strings.py
"""

import foredraft

llm = foredraft.load()
prompt = "def read_config(path):"
for stop, include in (((), False), ("path", False), ("path", True), (["\n\n", "file"], False)):
    params = foredraft.SamplingParams(temperature=0, max_new_tokens=32, stop=stop, include_stop=include)
    pieces = list(llm.stream(prompt, params))
    output = pieces[-1].output
    assert "".join(piece.text for piece in pieces) == output.text
    print(f"stop={stop!r} include_stop={include}: {output.finish_reason}, {output.stopped_by!r}")
    print(f"    {[piece.text for piece in pieces]}")
