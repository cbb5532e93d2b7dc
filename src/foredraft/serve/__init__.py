"""Serving: an OpenAI-compatible API over one loaded model.

    settings.py     options of a server
    requests.py     bodies -> checked fields -> sampling parameters and a prompt
    replies.py      pieces -> the events of a stream, or a whole reply; blocks.py, texts and calls of a sample
    completions.py, responses.py, messages.py    the shapes of replies, by path in shapes.py
    token_texts.py, provenance.py    log-probabilities; the source of each token
    tokens.py       text -> token ids, and back
    about.py, openapi.py    descriptions of the model; of the routes
    generations.py  the engine's thread -> the event loop; limits of load
    streaming.py    events -> server-sent events, plain text
    sockets.py      the same over WebSockets
    keys.py, clients.py, limits.py, bodies.py, origins.py, metrics.py, problems.py
    state.py        the model before and after it is loaded; how requests start
    app.py          the routes
    page.py         the page at `/`; its files are in static/
    server.py       loading, start and stop
    affinity.py     which of several replicas gets a request
    ray/            several replicas behind Ray Serve

The package needs the extra `serve`, and `ray/` the extra `ray`.
"""
