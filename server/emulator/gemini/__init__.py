"""The Gemini Developer API (`/v1`, `/v1beta`), as its documents and its observed error texts describe it.

A request walks through these files: `app` (key, path, faults that let nothing begin) → `decoding` and `fields` →
`explicit_caches` → `generation_config`, `turn_order`, `signatures` → `implicit_cache` → `generating` (what the model
says) → `rendering` (parts, chunks, tokens) → `sending` (SSE, JSON, and what breaks on the way).

What is special: keys are taken in camelCase and in snake_case; signatures are bound to model family, account and the
part they stand on; explicit caches are bound to model and account; the implicit cache hits whenever it is allowed to.
"""
