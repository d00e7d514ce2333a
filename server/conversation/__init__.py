"""The vocabulary of Strata: conversations, turns, blocks, calls, epochs, payloads, usage, errors and ids, and the ports
to storage.

All rooms import this room; it imports only the standard library and does no I/O. Its values are frozen. All of its
modules are public:

- `conversation`, `turn`, `block`, `event`, `image`, `turn_text`: conversations and their content
- `assistant`, `compaction_policy`: the configuration of an assistant
- `payload`, `manifest`, `epoch`, `call`, `usage`: what is sent to a provider, and what is recorded about it
- `store`, `cache_register`, `notifications`: the ports to conversations, explicit caches and notifications
- `api_key`, `audit`, `readiness`: the ports to keys, rate limits, the audit log and readiness checks
- `errors`: the tree of all errors
- `identifiers`, `exact_json`, `redaction`, `time_span`, `page`, `lru`, `bundled`, `outages`, `shutdown`: small shared
  building blocks
"""
