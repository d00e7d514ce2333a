// Shows the events of a running turn. Text of the model is only ever set as text, never as markup. When the turn has ended,
// the page is loaded again and replaces what was streamed. After a lost connection the browser reconnects with the id of
// the last event that it received.
(() => {
  "use strict";
  const MOST_LETTERS = 200_000;
  const TERMINAL = ["turn.completed", "turn.failed", "turn.cancelled"];

  // Control characters as control pictures, characters that change the text direction as code points, as on the pages.
  const UNSHOWABLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;
  const picture = (letter) => {
    const code = letter.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    if (code > 0x2000) return `[U+${code.toString(16).toUpperCase()}]`;
    return code === 0x7f ? "\u2421" : "\ufffd";
  };
  const show = (text) => text.replace(UNSHOWABLE, picture);

  const make = (name, className, ...children) => {
    const element = document.createElement(name);
    element.className = className;
    element.append(...children);
    return element;
  };

  const follow = (turn) => {
    const status = turn.querySelector("[data-status]");
    const calls = turn.querySelector(".calls");
    const tools = new Map();
    let letters = 0;
    let open = null; // the block that is being written, and its kind

    const place = (block) => {
      if (calls) calls.before(block);
      else turn.append(block);
    };

    const write = (target, text) => {
      letters += text.length;
      if (letters <= MOST_LETTERS) target.append(show(text));
      else status.textContent = "The turn is running. Long content is shown when it has ended.";
    };

    const say = (kind, text) => {
      if (open?.kind !== kind) {
        const target = make("pre", kind === "text" ? "said" : "said quiet");
        target.dir = "auto";
        if (kind === "text") place(make("div", "block", target));
        else {
          const fold = make("details", "block fold", make("summary", "", "Thinking"), target);
          fold.open = true;
          place(fold);
        }
        open = { kind, target };
      }
      write(open.target, text);
    };

    const call = (id, name) => {
      if (!tools.has(id)) {
        const target = make("pre", "json");
        target.dir = "auto";
        const label = make("strong", "", make("bdi", "", show(name)));
        const quiet = make("code", "quiet", make("bdi", "", show(id)));
        place(make("div", "block tool", make("p", "tool-head", make("span", "quiet", "calls"), label, quiet), target));
        tools.set(id, target);
      }
      open = null;
      return tools.get(id);
    };

    const source = new EventSource(turn.dataset.live);
    const on = (name, act) => source.addEventListener(name, (event) => act(JSON.parse(event.data)));
    source.addEventListener("open", () => {
      status.textContent = "The turn is running. The answer is shown as it arrives.";
    });
    on("thinking.delta", (data) => say("thinking", data.text));
    on("text.delta", (data) => say("text", data.text));
    on("tool_call.begin", (data) => call(data.id, data.name));
    on("tool_call.delta", (data) => write(call(data.id, ""), data.arguments_json));
    on("tool_call.end", (data) => {
      const target = call(data.id, data.name);
      target.textContent = "";
      write(target, JSON.stringify(data.arguments, null, 2));
    });
    const end = () => {
      source.close();
      renew(turn, status);
    };
    for (const name of TERMINAL) source.addEventListener(name, end);
    source.addEventListener("error", () => {
      if (source.readyState === EventSource.CLOSED) end();
      else status.textContent = "The connection was lost. Reconnecting …";
    });
    addEventListener("pagehide", () => source.close());
  };

  // Replaces the head and adds new turns; expanded sections elsewhere stay expanded.
  const renew = async (turn, status) => {
    try {
      const answer = await fetch(location.pathname, { headers: { accept: "text/html" } });
      if (!answer.ok || answer.redirected) throw new Error(`status ${answer.status}`);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.getElementById(turn.id);
      if (!fresh || fresh.dataset.live) throw new Error("it is not there yet");
      const known = [...document.querySelectorAll("#turns > .turn")].map((element) => element.id);
      const later = [...page.querySelectorAll("#turns > .turn")].filter((element) => !known.includes(element.id));
      document.getElementById("head").replaceWith(document.importNode(page.getElementById("head"), true));
      turn.replaceWith(...[fresh, ...later].map((element) => document.importNode(element, true)));
      begin();
    } catch {
      status.textContent = "The stream has ended. ";
      status.append(Object.assign(document.createElement("a"), { href: location.pathname, textContent: "Refresh" }));
    }
  };

  const begin = () => {
    for (const turn of document.querySelectorAll("#turns > [data-live]")) follow(turn);
  };
  begin();
})();
