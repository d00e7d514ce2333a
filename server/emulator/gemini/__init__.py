"""An emulator of the Gemini Developer API (`/v1`, `/v1beta`), from its documentation and observed error texts.

A request passes these modules: `app` (key, path, faults that replace the response) → `decoding` (messages and fields) →
`caches` (explicit) → `models` (settings), `turn_order`, `signatures` → `caches` (implicit) → `generating` (the reply) →
`rendering` (parts, chunks, tokens) → `sending` (SSE, JSON, and faults while sending).

Special here: keys are accepted in camelCase and in snake_case; signatures are bound to model family, account and part;
explicit caches are bound to model and account; the implicit cache always hits when it is allowed to.
"""
