// One trajectory: the conversation, and its tokens. A strip shows all of it, a window of tokens moves over it.
import {html, useState, useEffect, useRef, useCallback, useData, useRun, useLive, api, go, link, count, fixed, duration, clock, css, stalenessColor, versionColor, surprise, useTheme, Canvas, Chip, Problem, DASH} from '/static/lib.js';

const WINDOW = 2048;
const COLORS = [['mask', 'loss'], ['staleness', 'staleness'], ['version', 'version'], ['logprob', 'log-prob']];
const ANNOTATED = [['log_ratio', 'log-ratio'], ['entropy', 'entropy'], ['advantage', 'advantage']];  // where the learner recorded them
const LANES = [['loss', 'loss'], ['staleness', 'staleness'], ['version', 'version'], ['logprob', 'log-prob']];
const LANE = 13, GAP = 3, LABELS = 66;
// Of what the learner computed: a color by its sign, and how strong. A ratio of 2 and an entropy of 2 nats are full.
const FULL = {log_ratio: Math.LN2, entropy: 2, advantage: 2};
const tone = (name, value) => [css(name === 'entropy' ? 'teal' : value < 0 ? 'red' : 'blue'), Math.min(1, Math.abs(value) / FULL[name])];
const alpha = (color, share) => `color-mix(in srgb, ${color} ${Math.round(100 * share)}%, transparent)`;

export function Trajectory({run, id, query}) {
  const source = query.source || '', {data, error} = useRun(run.name, `trajectories/${id}`, {bins: 900, source});
  const [view, setView] = useState('tokens'), [by, setBy] = useState('staleness'), [start, setStart] = useState(0);
  useEffect(() => setStart(0), [id]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!data || data.id !== id) return html`<p class="muted">reading</p>`;
  const versions = [...new Set(data.version_spans.map(span => span[2]))];
  const stage = source.startsWith('evaluation') ? `of an evaluation: ${data.request}` : data.trained_at != null && data.account === 'trained' ? `trained into version ${data.trained_at}` : data.account === 'discarded' ? `discarded: ${data.reason}` : `${data.account}, its group is ${data.state}`;
  return html`<div class="row"><h1>${data.id}</h1><${Siblings} run=${run.name} one=${data} source=${source} /></div>
    <div class="card"><div class="chips">
      <${Chip} name="task">${data.task_id}<//><${Chip} name="environment">${data.env}<//><${Chip} name="reward">${count(data.reward)}<//>
      <${Chip} name="outcome">${data.outcome.kind}${data.outcome.reason && ': ' + data.outcome.reason}<//><${Chip} name="is">${stage}<//>
      ${data.withheld && html`<${Chip} name="no loss">${data.withheld}<//>`}
      <${Chip} name="tokens">${data.tokens}, ${data.sampled} sampled<//><${Chip} name="turns">${data.turns.length}<//><${Chip} name="took">${duration(data.timings.total)}<//>
      <${Chip} name="versions">${versions.length > 8 ? `${versions[0]} to ${versions[versions.length - 1]}` : versions.join(', ') || DASH}<//>${!source.startsWith('evaluation') && html`<${Chip} name="leased at">version ${data.leased_at}<//>`}
      ${data.started > 0 && html`<${Chip} name="began">${clock(data.started)}<//>`}
      ${Object.entries(data.metrics).map(([name, value]) => html`<${Chip} key=${name} name=${name}>${count(value)}<//>`)}</div>
      ${data.outcome.detail && html`<pre class="log">${data.outcome.detail}</pre>`}</div>
    ${!data.has_tokens ? html`<div class="card warn">Its tokens were dropped to free space (<code>buffer.keep</code>); what is above is kept.</div>` : html`
    <div class="card"><div class="row" role="tablist">${['tokens', 'conversation'].map(name => html`<button key=${name} role="tab" aria-selected=${view === name} class=${view === name ? 'on' : ''} onClick=${() => setView(name)}>${name}</button>`)}</div>
      <${Strip} one=${data} start=${start} move=${setStart} />
      ${view === 'tokens' ? html`<${Tokens} run=${run.name} one=${data} start=${start} move=${setStart} by=${by} setBy=${setBy} source=${source} />` : html`<${Conversation} run=${run.name} one=${data} source=${source} />`}</div>`}
    <${Times} one=${data} />`;
}

function Siblings({run, one, source}) {
  const {data} = useData(api(run, 'trajectories', {source, group: one.group_id, sort: 'newest', ascending: true, limit: 200}));
  const ids = data ? data.rows.map(row => row.id).sort((a, b) => a.localeCompare(b, 'en', {numeric: true})) : [];
  const at = ids.indexOf(one.id);
  const to = step => ids[at + step] && go(run, 'trajectory', ids[at + step], {source});
  useEffect(() => {
    const pressed = event => {
      if (event.target.closest('input, select') || event.metaKey || event.ctrlKey || event.altKey) return;
      if (event.key === '[') to(-1);
      if (event.key === ']') to(1);
    };
    addEventListener('keydown', pressed);
    return () => removeEventListener('keydown', pressed);
  });
  return html`<button disabled=${at <= 0} onClick=${() => to(-1)} aria-label="previous of its group" title="key [">◀</button>
    <a href=${link(run, 'group', one.group_id, {source})}>group ${one.group_id}${ids.length > 1 ? `, ${at + 1} of ${ids.length}` : ''}</a>
    <button disabled=${at < 0 || at >= ids.length - 1} onClick=${() => to(1)} aria-label="next of its group" title="key ]">▶</button>`;
}

function Strip({one, start, move}) {
  const strip = one.strip, lanes = one.annotated ? [...LANES, ...ANNOTATED] : LANES, height = lanes.length * (LANE + GAP), place = useRef({left: LABELS, width: 1});
  const draw = useCallback((context, width) => {
    const left = width < 420 ? 0 : LABELS, wide = width - left, total = one.tokens, x = token => left + token / total * wide;
    place.current = {left, width: wide};
    const columns = strip.edges.length - 1;
    context.font = '11px ' + css('font');
    lanes.forEach(([lane, label], row) => {
      const top = row * (LANE + GAP);
      context.fillStyle = css('muted');
      if (left) context.fillText(label, 0, top + LANE - 3);
      context.fillStyle = css('grid');
      context.fillRect(left, top, wide, LANE);
      for (let i = 0; i < columns; i++) {
        const from = x(strip.edges[i]), to = Math.max(from + 1, x(strip.edges[i + 1]));
        const fill = (color, part) => { context.globalAlpha = part; context.fillStyle = color; context.fillRect(from, top, to - from, LANE); context.globalAlpha = 1; };
        if (lane === 'loss') { if (strip.loss[i]) fill(css('blue'), .25 + .75 * strip.loss[i]); if (strip.without[i]) fill(css('red'), .25 + .75 * strip.without[i]); }
        else if (strip[lane][i] == null) continue;
        else if (lane === 'staleness') fill(stalenessColor(strip.staleness[i]), 1);
        else if (lane === 'version') fill(versionColor(strip.version[i]), .9);
        else if (FULL[lane]) { const [color, part] = tone(lane, strip[lane][i]); fill(color, .08 + .92 * part); }
        else fill(css('violet'), .12 + .88 * surprise(strip.logprob[i]));
      }
    });
    if (total > WINDOW) {
      context.strokeStyle = css('ink'); context.lineWidth = 1.5;
      context.strokeRect(x(start) + .75, .75, Math.max(3, x(Math.min(total, start + WINDOW)) - x(start)) - 1.5, height - GAP - 1.5);
    }
  }, [one, start]);
  const latest = Math.max(0, one.tokens - WINDOW), clamp = token => Math.max(0, Math.min(latest, Math.round(token)));
  const pull = event => {
    if (!(event.buttons & 1) || !latest) return;
    const {left, width} = place.current, at = event.clientX - event.currentTarget.getBoundingClientRect().left - left;
    move(clamp(at / width * one.tokens - WINDOW / 2));
  };
  const press = event => {
    const step = {ArrowLeft: -256, ArrowRight: 256, PageUp: -WINDOW, PageDown: WINDOW, Home: -one.tokens, End: one.tokens}[event.key];
    if (step) { event.preventDefault(); move(clamp(start + step)); }
  };
  return html`<div style=${{margin: '10px 0'}}><${Canvas} height=${height} draw=${draw} role="slider" tabindex="0" aria-label="window of tokens" aria-valuemin="0" aria-valuemax=${latest} aria-valuenow=${start}
    onPointerDown=${event => { event.currentTarget.setPointerCapture(event.pointerId); pull(event); }} onPointerMove=${pull} onKeyDown=${press} />
    <p class="legend-note">${one.tokens} tokens${latest ? `, ${start} to ${start + WINDOW} below: drag, or use the arrow keys` : ''}. Loss: blue with loss, red sampled without. Staleness: the oldest of a column.${one.annotated && ' Log-ratio: the largest of a column; of it and of advantages red is below 0.'}</p></div>`;
}

function Tokens({run, one, start, by, setBy, source}) {
  const ref = useRef(), [at, setAt] = useState(null), dark = useTheme();
  const change = useLive().changes[run];
  const {data, error} = useData(api(run, `trajectories/${one.id}/tokens`, {start, end: Math.min(one.tokens, start + WINDOW), source}), one.trained_at == null ? change : 0);
  useEffect(() => setAt(null), [one.id]);
  useEffect(() => { if (data && data.start === start) { fill(ref.current, data); } }, [data, start]);
  useEffect(() => { if (data) color(ref.current, data, by); }, [data, by, dark]);
  useEffect(() => {
    ref.current?.querySelector('.at')?.classList.remove('at');
    if (at != null) ref.current?.children[at]?.classList.add('at');
  }, [at, data]);
  const point = event => { const i = event.target.dataset?.i; if (i != null) setAt(+i); };
  const press = event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (step && data) { event.preventDefault(); setAt(Math.max(0, Math.min(data.ids.length - 1, (at ?? -1) + step))); }
  };
  return html`<div class="row"><span class="muted small">color</span>${[...COLORS, ...one.annotated ? ANNOTATED : []].map(([name, text]) => html`<button key=${name} data-by=${name} class=${by === name ? 'on' : ''} onClick=${() => setBy(name)}>${text}</button>`)}
      ${!one.annotated && html`<span class="muted small">log-ratio, entropy and advantage: ${one.trained_at == null ? 'not trained on' : 'not recorded'}</span>`}</div>
    <${Legend} by=${by} data=${data} one=${one} />
    ${error && html`<${Problem} error=${error} />`}
    <p class="detail muted" aria-live="polite">${at == null || !data ? 'point at a token, or use the arrow keys' : describe(data, at)}</p>
    <div class="tokens" ref=${ref} tabindex="0" aria-label="tokens" onMouseOver=${point} onClick=${point} onKeyDown=${press}></div>
    ${!one.tokenizer && html`<p class="legend-note">The run has no tokenizer, and its model's folder is not here: numbers are ids.</p>`}`;
}

// One element for each token; its text is a text node.
function fill(place, data) {
  const all = document.createDocumentFragment();
  data.ids.forEach((id, i) => {
    const span = document.createElement('span'), text = data.texts[i];
    span.textContent = text === '' ? '·' : text.replace(/\n/g, '⏎\n').replace(/\t/g, '→\t').replace(/\r/g, '␍');
    span.dataset.i = i;
    if (!data.loss[i]) span.className = 'context';
    else if (data.loss[i] === 2) span.className = 'without';
    if (data.staleness[i] >= 0 && data.loss[i]) span.dataset.staleness = data.staleness[i];
    all.append(span);
  });
  place.replaceChildren(all);
}

function color(place, data, by) {
  [...place.children].forEach((span, i) => {
    span.style.background = !data.loss[i] ? '' :
      by === 'mask' ? alpha(data.loss[i] === 1 ? css('blue') : css('red'), .28) :
      by === 'staleness' ? alpha(stalenessColor(data.staleness[i]), .38) :
      by === 'version' ? alpha(versionColor(data.versions[i]), .42) :
      FULL[by] ? annotated(data, by, i) :
      alpha(css('violet'), .06 + .6 * surprise(data.logprobs[i]));
  });
}

function annotated(data, name, i) {
  const value = data.annotations?.[name][i];
  if (value == null) return '';
  const [color, part] = tone(name, value);
  return alpha(color, .05 + .55 * part);
}

function describe(data, i) {
  const text = `token ${data.start + i} · id ${data.ids[i]} · ${JSON.stringify(data.texts[i])}`;
  if (!data.loss[i]) return `${text} · given, not sampled: no loss`;
  const p = Math.exp(data.logprobs[i]);
  return `${text} · sampled by version ${data.versions[i]} · staleness ${data.staleness[i]} · log-prob ${fixed(data.logprobs[i], 4)} (p = ${p < .001 ? p.toExponential(1) : p.toFixed(3)})${data.loss[i] === 2 ? ' · without loss' : ''}${learned(data.annotations, i)}`;
}

// What the learner computed, where the token had loss.
function learned(of, i) {
  if (!of || of.log_ratio[i] == null) return '';
  return ` · ratio ${fixed(Math.exp(of.log_ratio[i]), 4)} (log ${fixed(of.log_ratio[i], 4)}) · entropy ${fixed(of.entropy[i], 3)} · advantage ${fixed(of.advantage[i], 3)} · weight ${fixed(of.weight[i], 3)}${of.clipped[i] ? ' · clipped' : ''}${of.dropped[i] ? ' · loss dropped' : ''}`;
}

function Legend({by, data, one}) {
  if (!data) return null;
  const sampled = data.loss.map((loss, i) => loss ? i : -1).filter(i => i >= 0), key = (color, text) => html`<span class="chip key" key=${text}><i style=${{background: color}}></i>${text}</span>`;
  const found = list => [...new Set(sampled.map(i => list[i]))].sort((a, b) => a - b);
  const keys = by === 'mask' ? [key(css('blue'), 'loss'), ...(data.loss.includes(2) ? [key(css('red'), 'sampled, without loss')] : []), key('transparent', 'given: no loss')] :
    by === 'staleness' ? found(data.staleness).map(s => key(stalenessColor(s), s >= 4 ? `${s}` : String(s))) :
    by === 'version' ? found(data.versions).slice(0, 24).map(v => key(versionColor(v), `version ${v}`)) :
    FULL[by] ? (by === 'entropy' ? [0, .5, 1] : [-1, -.5, .5, 1]).map(part => { const [color, strong] = tone(by, part * FULL[by]); return key(alpha(color, .05 + .55 * strong), fixed(part * FULL[by], 2)); }) :
    [0, -1, -3].map(l => key(alpha(css('violet'), .06 + .6 * surprise(l)), l === -3 ? 'log-prob −3 and less' : `${l}`));
  return html`<div class="chips" style=${{marginTop: '8px'}}>${keys}${by === 'staleness' && one.trained_at == null && html`<span class="muted small">counted from version ${one.learner_version}, which the learner has now</span>`}</div>`;
}

function Conversation({run, one, source}) {
  const {data, error} = useData(api(run, `trajectories/${one.id}/messages`, {source}));
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="muted">reading</p>`;
  const who = message => message.turn == null ? `${message.role || 'given'} ${message.name}`.trim() : `${message.role}, turn ${message.turn + 1}`;
  const reward = message => message.turn != null && one.turn_rewards[message.turn] ? ` · reward ${count(one.turn_rewards[message.turn])}` : '';
  return html`${data.map((message, i) => html`<div key=${i} class="message ${message.turn == null ? '' : 'sampled'}"><div class="who">${who(message)} · tokens ${message.start} to ${message.end}${reward(message)}</div>${message.malformed && html`<div class="malformed">not read: ${message.malformed}</div>`}${one.images.filter(image => message.start <= image.start && image.end <= message.end).map(image => html`<img key=${image.start} class="seen" alt="" src=${`/api/runs/${encodeURIComponent(run)}/images/${image.name}`} onError=${event => event.target.remove()} />`)}<pre>${message.text}${message.cut && '\n… (cut; the tokens have all of it)'}</pre></div>`)}`;
}

function Times({one}) {
  const rows = [...one.turns.map((turn, i) => ({at: turn.asked, what: `turn ${i + 1}`, took: turn.queued_s + turn.first_s + turn.decode_s, note: `queued ${duration(turn.queued_s)}, first token ${duration(turn.first_s)}, decode ${duration(turn.decode_s)} for ${turn.end - turn.start} tokens${turn.cached == null ? '' : `, ${turn.cached} cached`}${turn.replica && ', ' + turn.replica}, ended by ${turn.finish_reason}`})),
    ...one.env_calls.map(call => ({at: call.begin, what: call.tool ? `tool ${call.tool}` : call.what, took: call.end - call.begin, note: call.error && `failed: ${call.error}`}))]
    .filter(row => row.at > 0).sort((a, b) => a.at - b.at);
  if (!rows.length) return null;
  const first = rows[0].at;
  return html`<div class="card scroll"><h2>what it did</h2><table><thead><tr><th>what</th><th>after</th><th>took</th><th class="text"></th></tr></thead><tbody>
    ${rows.map((row, i) => html`<tr key=${i}><td>${row.what}</td><td>${duration(row.at - first)}</td><td>${duration(row.took)}</td><td class="text wrap muted">${row.note}</td></tr>`)}</tbody></table></div>`;
}
