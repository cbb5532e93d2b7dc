"""Serving: an OpenAI-compatible API over one loaded model.

A request passes through `app` (routes), `requests` (fields), `generations` (the engine's thread), `blocks`
(thinking, texts and calls) and `replies`, whose shapes are `completions`, `responses` and `messages`. The
package needs the extra `serve`, `ray/` the extra `ray`.
"""
