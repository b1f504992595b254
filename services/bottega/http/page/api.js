// Calls to the API. The key is kept in memory only: it is gone when the page is closed or loaded again.

let key = "";

export function setKey(value) {
  key = value.trim();
}

export function currentKey() {
  return key;
}

export class ApiError extends Error {
  // fields: what to change, by field of the API. status: of HTTP, 0 if the service cannot be reached.
  constructor(message, { status = 0, fields = {}, retryAfter = 0 } = {}) {
    super(message);
    this.status = status;
    this.fields = fields;
    this.retryAfter = retryAfter;
  }

  // Whether the same request may succeed later.
  get passes() {
    return this.status === 0 || this.status === 429 || this.status === 502 || this.status === 503;
  }
}

export async function call(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key) sent.authorization = `Bearer ${key}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  let answer;
  try {
    const text = body === undefined ? undefined : JSON.stringify(body);
    answer = await fetch(path, { method, headers: sent, body: text, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("Bottega cannot be reached. Is it still running?");
  }
  if (!answer.ok) throw await errorOf(answer);
  return answer;
}

export async function getJson(path, options) {
  return (await call(path, options)).json();
}

export async function getBlob(path, options) {
  return (await call(path, options)).blob();
}

async function errorOf(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // A proxy's answer is not JSON.
  }
  const retryAfter = Number(answer.headers.get("retry-after")) || 0;
  const violations = error.bottega?.violations ?? [];
  const fields = Object.fromEntries(violations.map((item) => [item.field, item.description]));
  return new ApiError(sentence(answer.status, error, retryAfter), { status: answer.status, fields, retryAfter });
}

function sentence(status, error, retryAfter) {
  if (status === 401) return "An API key is needed, or the one you gave is not valid.";
  if (error.code === "unavailable") return "The gateway does not answer at the moment.";
  const message = (error.message ?? `the service answered ${status}`).replace(/; retry$/, "");
  const advice = retryAfter ? ` (try again in ${Math.ceil(retryAfter)} s)` : "";
  return message.charAt(0).toUpperCase() + message.slice(1) + advice;
}

// Open a stream of events, {id, type, data}, and return their generator. Read by fetch, because an EventSource cannot
// send a key.
export async function openEvents(path, { lastId = "", signal } = {}) {
  const headers = lastId ? { "last-event-id": lastId } : {};
  return read(await call(path, { headers, signal }));
}

async function* read(answer) {
  if (answer.status === 204) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection broke.");
    }
    if (part.done) return;
    rest += part.value.replaceAll("\r\n", "\n");
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const found = parse(block);
      if (found) yield found;
    }
  }
}

function parse(block) {
  const fields = {};
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    if (at > 0) fields[line.slice(0, at)] = line.slice(at + 1).trimStart();
  }
  return fields.data ? { id: fields.id ?? "", type: fields.event, data: JSON.parse(fields.data) } : null;
}

// A request ID. crypto.randomUUID exists on loopback and HTTPS only.
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export async function base64(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  let text = "";
  for (let start = 0; start < bytes.length; start += 0x8000) {
    text += String.fromCharCode(...bytes.subarray(start, start + 0x8000));
  }
  return btoa(text);
}
