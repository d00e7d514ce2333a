"""The program: settings, and the modules that build every part and connect them.

The room owns the settings, the HTTP server, and the choice of an implementation for each port. It promises that the
tests open the same program that is deployed, and that everything it opens is closed in reverse order when the block
ends. Importing these modules does not import the SDK of a provider: `providers` does that when it opens one.

The room `cli` uses these modules:

- `settings`: `Settings` of servers and workers, `ClientSettings` of `strata chat`
- `wiring`: `open_program`, which opens a server, and `open_worker`
- `asgi`: serves a program over HTTP
- `http_server`: uvicorn with limits for connections and request heads; the room `emulator` uses it as well
- `database`: opens the database of the settings for commands
- `providers`: opens the providers whose keys are set, and offline providers without keys
- `services`: opens the store, rendering and compaction for commands
- `replays`: opens replays for commands
"""
