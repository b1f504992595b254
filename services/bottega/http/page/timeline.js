// The trace of a job as a picture: a lane for each part of a service, with a bar for each span of time.

import { html, svg } from "./vendor/lit-html.js";
import { seconds } from "./stage.js";

const WIDTH = 640;
const LABELS = 170;
const ROW = 22;
const TICKS = 4;

export function timeline(spans) {
  const lanes = lanesOf(spans);
  const end = Math.max(...spans.map((span) => span.begin_s + span.seconds), 1e-3);
  const x = (time) => LABELS + (Math.max(0, time) / end) * (WIDTH - LABELS - 8);
  const height = lanes.length * ROW + 24;
  return html`
    <h3>Timeline</h3>
    <div class="timeline">
      <svg viewBox="0 0 ${WIDTH} ${height}" role="img" aria-label="Timeline of the job, ${seconds(end)} in all">
        ${ticks(end).map(
          (time) => svg`
            <line class="tick" x1=${x(time)} x2=${x(time)} y1="0" y2=${height - 18} />
            <text class="time" x=${x(time)} y=${height - 4} text-anchor="middle">${seconds(time)}</text>
          `,
        )}
        ${lanes.map((lane, row) => laneOf(lane, row * ROW, x))}
      </svg>
    </div>
    <details class="more">
      <summary>As a table</summary>
      <table>
        <thead>
          <tr>
            <th>Part</th>
            <th>Span</th>
            <th>Begin</th>
            <th>Time</th>
          </tr>
        </thead>
        <tbody>
          ${spans.map(
            (span) => html`
              <tr>
                <td>${span.service}, ${span.track}</td>
                <td>${span.name}</td>
                <td>${seconds(span.begin_s)}</td>
                <td>${seconds(span.seconds)}</td>
              </tr>
            `,
          )}
        </tbody>
      </table>
    </details>
  `;
}

function laneOf(lane, y, x) {
  return svg`
    <text class="lane" x="0" y=${y + 15}>${lane.label}</text>
    ${lane.spans.map(
      (span) => svg`
        <rect
          class="bar kind-${span.track === "waits" ? "waits" : lane.colour}"
          x=${x(span.begin_s)}
          y=${y + 3}
          width=${Math.max(1.5, x(span.begin_s + span.seconds) - x(span.begin_s))}
          height=${ROW - 7}
          rx="2"
        ><title>${span.name}: ${seconds(span.seconds)}</title></rect>
      `,
    )}
  `;
}

function lanesOf(spans) {
  const services = [...new Set(spans.map((span) => span.service))];
  const lanes = new Map();
  for (const span of spans) {
    const label = `${span.service} · ${span.track}`;
    if (!lanes.has(label)) lanes.set(label, { label, colour: services.indexOf(span.service) % 5, spans: [] });
    lanes.get(label).spans.push(span);
  }
  return [...lanes.values()].sort((one, other) => one.colour - other.colour);
}

function ticks(end) {
  return Array.from({ length: TICKS }, (_, index) => (end * (index + 1)) / (TICKS + 1));
}
