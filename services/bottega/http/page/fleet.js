// The services of the suite, for operators: where they are, what they host and how busy they are.

import { html, nothing } from "./vendor/lit-html.js";
import { ApiError, getJson } from "./api.js";
import { seconds } from "./stage.js";
import { state, update } from "./store.js";

const LOOK_MS = 2_000;
const FOR_OPERATORS =
  "The fleet is for operators. This gateway asks for API keys, which are tenants' keys, so the page cannot tell who " +
  "is an operator: run bottega fleet with an operator's certificate.";

let timer = 0;

export async function watchFleet() {
  clearTimeout(timer);
  try {
    update({ fleet: { ...(await getJson("/v1/fleet")), failure: "" } });
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    const refused = error.status === 401 || error.status === 403;
    const failure = refused ? FOR_OPERATORS : error.message;
    update({ fleet: { data: refused ? [] : (state.fleet?.data ?? []), failure } });
    if (refused) return;
  }
  if (state.view === "fleet") timer = setTimeout(watchFleet, LOOK_MS);
}

export function fleetView() {
  const { fleet } = state;
  if (!fleet) return html`<section class="panel"><p class="hint">Asking the gateway …</p></section>`;
  return html`
    <section class="panel" aria-label="Fleet">
      <div class="row heading">
        <h2>Fleet</h2>
        ${fleet.failure ? nothing : html`<span class="hint">${queue(fleet)}</span>`}
      </div>
      ${fleet.failure ? html`<p class="failure">${fleet.failure}</p>` : nothing}
      ${fleet.data.length ? table(fleet.data) : nothing}
    </section>
  `;
}

function queue(fleet) {
  if (!fleet.queued) return "No job waits.";
  return `${fleet.queued} ${fleet.queued === 1 ? "job waits" : "jobs wait"}, the first for ${seconds(fleet.longest_wait_s)}.`;
}

function table(members) {
  return html`
    <div class="scrolled" tabindex="0" role="region" aria-label="Services">
      <table class="fleet">
        <thead>
          <tr>
            <th>Service</th>
            <th>State</th>
            <th>Serves</th>
            <th>Device</th>
            <th class="number">Running</th>
            <th class="number">Steps to go</th>
            <th class="number">Memory</th>
            <th class="number">Joined</th>
          </tr>
        </thead>
        <tbody>
          ${members.map(row)}
        </tbody>
      </table>
    </div>
  `;
}

function row(member) {
  const serves = member.models.length ? member.models : member.hosted.map((item) => item.name);
  return html`
    <tr>
      <td><b>${member.name}</b><br /><span class="hint">${member.kind}, ${member.address}</span></td>
      <td>${stateOf(member)}</td>
      <td>
        ${[...new Set(serves)].slice(0, 8).join(", ")}
        ${member.left_out.map((item) => html`<p class="problem">${item.name}: ${item.reason}</p>`)}
      </td>
      <td>${member.device}</td>
      <td class="number">${member.running || ""}</td>
      <td class="number">${member.steps_left || ""}</td>
      <td class="number">${member.memory_bytes ? `${Math.round(member.memory_bytes / 1e6)} MB` : ""}</td>
      <td class="number">${since(member.joined_s)} ago</td>
    </tr>
  `;
}

function stateOf(member) {
  if (member.starting)
    return html`<span class="state queued">starting</span> <span class="hint">${member.starting}</span>`;
  if (member.draining) return html`<span class="state cancelled">stopping</span>`;
  return html`<span class="state completed">ready</span>`;
}

function since(value) {
  if (value < 5400) return value < 90 ? `${Math.round(value)} s` : `${Math.round(value / 60)} min`;
  return value < 172_800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86_400)} d`;
}
