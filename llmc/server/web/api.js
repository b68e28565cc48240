// The server's API: JSON calls and server-sent events, with the API key if one is set.

// The server's URL: a proxy may serve it under a path. This file is in its ui folder.
const BASE = new URL("..", import.meta.url);
const KEY = "llmc.key"; // in sessionStorage: deleted with the tab

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

async function call(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(new URL(path.slice(1), BASE), {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
  });
  if (response.ok) return response;
  let message = `The server responded with status ${response.status}.`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    // not one of our errors: perhaps a proxy's page
  }
  throw new ApiError(response.status, message);
}

export async function getJson(path) {
  return (await call(path)).json();
}

// Yields the parsed data of each event; returns at [DONE] or when the server closes the stream.
export async function* events(path, options) {
  const response = await call(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (!block.startsWith("data: ")) continue; // a comment that keeps the connection alive
        const data = block.slice(6);
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
