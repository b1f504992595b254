// Watches whether the service and the gateway behind it answer, and loads the lists again when they come back.

import { currentKey, getJson } from "./api.js";
import { say, state, update } from "./store.js";

const WELL_MS = 10_000;
const AWAY_MS = 1_500;

let timer = 0;
let looking = null;

export function watchConnection() {
  clearTimeout(timer);
  looking ??= look().finally(() => {
    looking = null;
    timer = setTimeout(watchConnection, state.connection === "ok" ? WELL_MS : AWAY_MS);
  });
  return looking;
}

async function look() {
  const before = state.connection;
  const now = await reachable();
  if (now === "ok" && (before !== "ok" || !state.models.length)) await loadLists();
  if (now === before) return;
  update({ connection: now });
  if (now !== "ok") say(now === "away" ? "Bottega cannot be reached." : "The gateway does not answer.");
  else if (before !== "unknown") say("The connection is back.");
}

async function reachable() {
  try {
    return (await fetch("/readyz", { cache: "no-store" })).ok ? "ok" : "gateway";
  } catch {
    return "away";
  }
}

// Load what a request may name, and return whether that worked. Answers to an earlier key are dropped.
export async function loadLists() {
  const key = currentKey();
  try {
    const [models, loras, controlnets] = await Promise.all(
      ["/v1/models", "/v1/loras", "/v1/controlnets"].map((path) => getJson(path)),
    );
    if (key !== currentKey()) return false;
    update({ models: models.data, loras: loras.data, controlnets: controlnets.data });
    return true;
  } catch (error) {
    if (error.status === 401 && key === currentKey()) update({ keyShown: true, keyFailure: state.hasKey ? error.message : "" });
    return false;
  }
}
