// When: what the learner did, pushes, gauges of all processes in one window of time; and the life of the episodes of a batch.
import {html, useState, useEffect, useRef, useCallback, useMemo, useData, useRun, useLive, api, go, link, css, count, duration, clock, versionColor, Canvas, Problem, recorded} from '/static/lib.js';

const PHASE_COLORS = {take: 'grid', sleep: 'grid', train: 'blue', commit: 'teal', publish: 'green', checkpoint: 'violet', recover: 'red', first_rollout: 'grid', stage: 'teal', pause: 'red', swap: 'orange', canary: 'violet'};
const PHASE_TEXTS = {take: 'waits for a batch', sleep: 'replicas fall asleep', train: 'step', commit: 'commit', publish: 'push', checkpoint: 'checkpoint', recover: 'recovers', first_rollout: 'first push', stage: 'stages weights', pause: 'paused', swap: 'swaps weights', canary: 'canary'};
const PART_COLORS = {queue: 'muted', prefill: 'teal', task: 'grid', reset: 'grid', step: 'grid', tool: 'orange', failed: 'red'};
const GAUGES = [
  ['buffer', [['ready', 'groups ready'], ['leased', 'groups leased'], ['batched', 'groups in a batch']]],
  ['worker', [['playing', 'episodes playing'], ['slots', 'slots'], ['queued', 'requests queued'], ['tokens', 'tokens/s']]],
  ['replicas', [['running', 'sequences decoded'], ['waiting', 'sequences waiting'], ['kv', 'KV cache, share']]],
  ['process', [['cpu_s', 'cores'], ['rss', 'memory, bytes']]],
  ['gpus', [['utilization', 'busy, share'], ['memory', 'memory, bytes']]],
];

export function Timeline({run, query}) {
  const {data, error} = useRun(run.name, 'timeline', {t0: query.t0, t1: query.t1});
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="muted">reading</p>`;
  if (!data.bounds) return html`<h1>${run.name}</h1><div class="card">The run has recorded no spans and no gauges.</div><${Batch} run=${run} query=${query} />`;
  const span = data.t1 - data.t0, [first, last] = data.bounds;
  const show = (t0, t1) => go(run.name, 'timeline', '', {...query, t0: t0.toFixed(3), t1: t1.toFixed(3)});
  const move = by => show(data.t0 + by * span, data.t1 + by * span);
  const zoom = by => { const middle = (data.t0 + data.t1) / 2, half = Math.max(.05, by * span / 2); show(middle - half, middle + half); };
  const lanes = [...new Set(data.pushes.map(one => one.ids.replica || 'push'))].sort();
  return html`<h1>${run.name}</h1><div class="card"><div class="row">
      <button onClick=${() => move(-.7)} aria-label="earlier" disabled=${data.t0 <= first}>◀</button><button onClick=${() => move(.7)} aria-label="later" disabled=${data.t1 >= last}>▶</button>
      <button onClick=${() => zoom(.5)}>closer</button><button onClick=${() => zoom(2)}>wider</button><button onClick=${() => show(first, last)}>all</button>
      ${!recorded && html`<a href=${link(run.name, 'timeline', '', {version: query.version})}>newest minute</a>`}
      <span class="muted small">${clock(data.t0)} to ${clock(data.t1)}, ${duration(span)}; the run: ${clock(first)} to ${clock(last)}</span></div>
    <${Keys} names=${[...new Set([...data.phases, ...data.pushes].map(one => one.what))]} />
    <${Spans} name="learner" data=${data} spans=${data.phases} />
    ${lanes.map(name => html`<${Spans} key=${name} name=${name === 'push' ? 'push' : name} data=${data} spans=${data.pushes.filter(one => (one.ids.replica || 'push') === name)} />`)}
    ${gauges(data.series).map(([name, rows]) => html`<${Gauge} key=${name} name=${name} data=${data} values=${rows} />`)}
    </div><${Batch} run=${run} query=${query} />`;
}

const Keys = ({names}) => html`<div class="chips" style=${{margin: '8px 0'}}>${names.map(name => html`<span class="chip key" key=${name}><i style=${{background: `var(--${PHASE_COLORS[name] || 'muted'})`}}></i>${PHASE_TEXTS[name] || name}</span>`)}</div>`;

function Spans({name, data, spans}) {
  const draw = useCallback((context, width, height) => {
    const x = t => (t - data.t0) / (data.t1 - data.t0) * width;
    for (const one of spans) {
      context.fillStyle = css(PHASE_COLORS[one.what] || 'muted');
      context.fillRect(x(one.t0), 0, Math.max(1, x(one.t1) - x(one.t0)), height);
    }
  }, [data]);
  const [text, setText] = useState('');
  const point = event => {
    const t = data.t0 + event.offsetX / event.currentTarget.clientWidth * (data.t1 - data.t0);
    const found = spans.filter(one => one.t0 <= t && t <= one.t1).sort((a, b) => (a.t1 - a.t0) - (b.t1 - b.t0))[0];
    setText(found ? `${PHASE_TEXTS[found.what] || found.what}, ${duration(found.t1 - found.t0)}, version ${found.ids.version}` : '');
  };
  return html`<div class="lane"><span class="name">${name}${text && html`<br /><span class="muted small">${text}</span>`}</span>
    <${Canvas} height=${22} draw=${draw} role="img" aria-label=${`${name}: ${spans.length} spans`} onMouseMove=${point} onMouseLeave=${() => setText('')} /></div>`;
}

// [name, values] of every gauge that is drawn; of replicas the sum over workers, each of which has its share of the requests.
function gauges(series) {
  const found = [];
  for (const [kind, names] of GAUGES)
    for (const [role, columns] of Object.entries(series)) {
      if (kind === 'process' || role.startsWith(kind)) for (const [name, text] of names) if (columns[name]?.some(value => value)) found.push([`${role}: ${text}`, columns[name]]);
      if (kind === 'replicas') for (const column of Object.keys(columns)) for (const [name, text] of names)
        if (column.startsWith('replicas.') && column.endsWith('.' + name) && columns[column].some(value => value)) found.push([`${column.split('.').slice(1, -1).join('.')}: ${text}`, columns[column]]);
      if (kind === 'gpus') for (const column of Object.keys(columns)) {
        const [, server, gpu, what] = column.match(/^(?:servers\.(.+)\.)?gpus\.([^.]+)\.([^.]+)$/) || [];
        for (const [name, text] of names) if (name === what) found.push([`${server || role}: GPU ${gpu} ${text}`, columns[column]]);
      }
    }
  return found;
}

function Gauge({name, data, values}) {
  const known = values.filter(value => value != null), most = Math.max(1e-12, ...known);
  const draw = useCallback((context, width, height) => {
    // A value lasts until the next one, at most a little longer than the second between two of them, or what is left of a long run.
    const at = values.flatMap((value, i) => value == null ? [] : [i]), least = Math.min(...at.slice(1).map((i, before) => i - at[before]));
    const part = (data.t1 - data.t0) / data.points, longest = Math.max(1, Math.ceil(1.5 / part), 1 < least && least < Infinity ? least + 1 : 0);
    context.fillStyle = css('blue'); context.globalAlpha = .55;
    values.forEach((value, i) => {
      if (value == null) return;
      let until = i + 1;
      while (until < values.length && values[until] == null && until - i < longest) until++;
      const tall = Math.max(value ? 1 : 0, value / most * (height - 1)), x = Math.round(i / data.points * width);
      context.fillRect(x, height - tall, Math.round(until / data.points * width) - x, tall);
    });
    context.globalAlpha = 1; context.fillStyle = css('grid'); context.fillRect(0, height - 1, width, 1);
  }, [data]);
  const mean = known.reduce((a, b) => a + b, 0) / Math.max(1, known.length);
  return html`<div class="lane"><span class="name">${name}<br /><span class="muted small">mean ${count(mean)}, most ${count(most)}</span></span><${Canvas} height=${32} draw=${draw} role="img" aria-label=${`${name}: mean ${count(mean)}, most ${count(most)}`} /></div>`;
}

const ROW = 11;

function Batch({run, query}) {
  const change = useLive().changes[run.name];
  const latest = run.now?.version, version = query.version ?? latest;
  const {data, error} = useData(version == null ? null : api(run.name, `batches/${version}`), change);
  if (version == null) return null;
  const show = to => go(run.name, 'timeline', '', {...query, version: to});
  return html`<div class="card"><div class="row"><h2>the batch of version ${version}</h2>
      <button disabled=${data?.previous == null} onClick=${() => show(data.previous)} aria-label="previous batch">◀</button><button disabled=${data?.next == null} onClick=${() => show(data.next)} aria-label="next batch">▶</button></div>
    ${error && html`<${Problem} error=${error} />`}${data && html`<${Anatomy} run=${run.name} data=${data} />`}</div>`;
}

function Anatomy({run, data}) {
  const [at, setAt] = useState(null);
  const shown = data.episodes.filter(one => one.started > 0);
  const start = Math.min(...shown.map(one => one.started)), end = Math.max(data.commit?.time || 0, ...shown.map(one => one.taken || one.ended));
  const draw = useCallback((context, width) => {
    const x = t => (t - start) / Math.max(1e-9, end - start) * width;
    shown.forEach((one, row) => {
      const top = row * ROW, box = (from, to, color, part = 1) => { context.globalAlpha = part; context.fillStyle = color; context.fillRect(x(from), top, Math.max(.7, x(to) - x(from)), ROW - 2); context.globalAlpha = 1; };
      box(one.started, one.ended, css('grid'), .6);
      for (const [from, to, what, version] of one.parts) box(from, to, what === 'decode' ? versionColor(version) : css(PART_COLORS[what] || 'muted'), what === 'queue' ? .5 : 1);
      if (one.ready && one.ended < one.ready) box(one.ended, one.ready, css('muted'), .18);
      if (one.ready && one.taken) { context.fillStyle = css('muted'); context.fillRect(x(one.ready), top + (ROW - 2) / 2 - .5, x(one.taken) - x(one.ready), 1); }
    });
    if (data.commit) { context.fillStyle = css('ink'); context.fillRect(x(data.commit.time) - 1, 0, 1.5, shown.length * ROW); }
  }, [data]);
  if (!shown.length) return html`<p class="muted">${data.episodes.length ? 'The times of its episodes were not recorded.' : 'None of its episodes is in the buffer: it is not made yet, or they were dropped to free space.'}</p>`;
  const one = shown[at];
  const point = event => setAt(Math.min(shown.length - 1, Math.floor(event.offsetY / ROW)));
  const versions = [...new Set(shown.flatMap(one => one.parts.filter(part => part[2] === 'decode').map(part => part[3])))].sort((a, b) => a - b);
  const keys = [['muted', 'waits for a replica'], ['teal', 'until the first token'], ['orange', 'tool'], ['red', 'failed call']];
  return html`<div class="chips">${versions.map(v => html`<span class="chip key" key=${v}><i style=${{background: versionColor(v)}}></i>decoded by version ${v}</span>`)}${keys.map(([color, text]) => html`<span class="chip key" key=${text}><i style=${{background: `var(--${color})`}}></i>${text}</span>`)}</div>
    <p class="detail muted" aria-live="polite">${one ? `${one.id}: ${one.outcome}, reward ${count(one.reward)}, played ${duration(one.ended - one.started)}, waited ${duration((one.taken || end) - one.ended)} until it was taken` : `${shown.length} episodes, ${duration(end - start)} from the first start to the commit (the line at the right); a thin line: its group is complete and waits`}</p>
    <${Canvas} height=${shown.length * ROW} draw=${draw} role="img" aria-label=${`${shown.length} episodes of version ${data.version}`} onMouseMove=${point} onClick=${() => one && go(run, 'trajectory', one.id)} />`;
}
