"""Serving: an OpenAI-compatible API over one loaded model.

    settings.py     options of a server
    requests.py     bodies -> checked fields -> sampling parameters and a prompt
    replies.py      pieces -> the objects of the API; provenance.py, the source of each token
    responses.py, messages.py    two more shapes of requests and replies
    tokens.py       text -> token ids, and back
    openapi.py, shapes.py    what the app says of its routes; the types of all replies
    generations.py  the engine's thread -> the event loop; limits of load
    streaming.py    objects -> server-sent events, plain text
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
