// The fleet, the processes, what each waits for, and the ends of their logs.
import {html, useState, useRun, useData, useLive, api, link, count, share, duration, ago, now, Problem, DASH} from '/static/lib.js';

const bytes = n => n == null ? DASH : n < 1 << 20 ? `${Math.ceil(n / 1024)} KiB` : n < 1 << 30 ? `${Math.round(n / (1 << 20))} MiB` : `${(n / (1 << 30)).toFixed(1)} GiB`;
const plain = (name, value) => typeof value === 'number' ? `${name.replaceAll('_', ' ')} ${count(value)}` : typeof value === 'string' ? `${name}: ${value}` : '';

export function Processes({run}) {
  const {data, error} = useRun(run.name, 'processes');
  const [log, setLog] = useState('');
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="muted">reading</p>`;
  const replicas = {};
  for (const one of data.processes) for (const [name, load] of Object.entries(one.replicas)) {
    const sum = replicas[name] ??= {...load, sent: 0};
    sum.sent += load.sent || 0;
  }
  return html`<h1>${run.name}</h1>
    ${run.active && html`<${Status} run=${run.name} />`}
    <div class="card scroll"><h2>inference servers, as their workers see them</h2>${Object.keys(replicas).length ? html`<table><thead><tr><th>replica</th><th>version</th><th>decoding</th><th>waiting</th><th>KV cache</th><th title="of the tokens that speculative decoding drafted">drafts accepted</th><th>requests there</th></tr></thead><tbody>
      ${Object.entries(replicas).sort().map(([name, one]) => html`<tr key=${name}><td>${name}</td><td>${one.version ?? DASH}</td><td>${one.running ?? DASH}</td><td>${one.waiting ?? DASH}</td><td>${share(one.kv)}</td><td>${one.drafted ? share(one.accepted / one.drafted) : DASH}</td><td>${one.sent}</td></tr>`)}</tbody></table>` : html`<p class="muted">none reported</p>`}</div>
    <div class="card scroll"><h2>processes</h2><table><thead><tr><th>role</th><th>pid</th><th>reported</th><th>cores</th><th>memory</th><th class="text">gauges</th><th>lines dropped</th></tr></thead><tbody>
      ${data.processes.map(one => html`<tr key=${one.role}><td>${one.role}</td><td>${one.pid}</td><td>${ago(now() - one.age_s)}</td><td>${one.cores == null ? DASH : one.cores.toFixed(2)}</td><td>${bytes(one.rss)}</td>
        <td class="text wrap">${Object.entries(one.gauges).map(([name, value]) => plain(name, value)).filter(text => text).join(', ')}</td><td>${one.dropped || ''}</td></tr>`)}</tbody></table>
      ${!data.processes.length && html`<p class="muted">none has recorded a gauge</p>`}</div>
    <${Gpus} rows=${data.processes.flatMap(one => one.gpus)} />
    ${data.logs.length > 0 && html`<div class="card"><h2>logs</h2><div class="row">${data.logs.map(one => html`<button key=${one.name} class=${log === one.name ? 'on' : ''} onClick=${() => setLog(log === one.name ? '' : one.name)} title="${bytes(one.bytes)}, changed ${ago(one.time)}">${one.name.replace(/\.log$/, '')}</button>`)}</div>
      ${log && html`<${Log} run=${run.name} name=${log} />`}</div>`}`;
}

function Gpus({rows}) {
  if (!rows.length) return null;
  return html`<div class="card scroll"><h2>GPUs</h2><table><thead><tr><th>role</th><th>GPU</th><th title="share of the time in which it computed">busy</th><th>memory</th><th>of</th><th>power</th><th>temperature</th></tr></thead><tbody>
      ${rows.map(one => html`<tr key=${`${one.role} ${one.gpu}`}><td>${one.role}</td><td>${one.gpu}</td><td>${share(one.utilization)}</td><td>${bytes(one.memory)}</td><td>${bytes(one.memory_total)}</td><td>${one.power_w == null ? DASH : `${Math.round(one.power_w)} W`}</td><td>${one.temperature_c == null ? DASH : `${one.temperature_c} °C`}</td></tr>`)}</tbody></table></div>`;
}

function Log({run, name}) {
  const {data, error} = useRun(run, `logs/${name}`);
  if (error) return html`<${Problem} error=${error} />`;
  return data && html`<p class="legend-note">${name}, ${bytes(data.bytes)}, its end</p><pre class="log" tabindex="0">${data.text}</pre>`;
}

function Status({run}) {
  const {data, error} = useRun(run, 'status');
  if (error) return html`<p class="muted small">${error}</p>`;
  if (!data) return null;
  return html`<div class="card scroll"><h2>fleet</h2><table><thead><tr><th>replica</th><th class="text">state</th><th>version</th><th>pid</th><th>starts</th></tr></thead><tbody>
      ${data.replicas.map(one => html`<tr key=${one.name}><td>${one.name}</td><td class="text">${one.state}</td><td>${one.version ?? DASH}</td><td>${one.pid ?? DASH}</td><td>${one.incarnation + 1}</td></tr>`)}</tbody></table></div>
    <div class="card scroll"><h2>waits, the oldest first</h2><table><thead><tr><th>role</th><th>for</th><th>at most</th><th class="text">who</th><th class="text">waits for</th><th>alike</th></tr></thead><tbody>
      ${data.waits.map((one, i) => html`<tr key=${i}><td>${one.role}</td><td>${duration(one.wait.age_s)}</td><td>${one.wait.deadline_s == null ? 'no end' : duration(one.wait.deadline_s)}</td><td class="text wrap">${one.wait.who}</td><td class="text wrap">${one.wait.waits_for}</td><td>${one.wait.alike > 1 ? one.wait.alike : ''}</td></tr>`)}</tbody></table></div>`;
}
