// All trajectories of a run, filtered and sorted by the server, page after page.
import {html, useState, useEffect, useLive, useData, get, api, go, link, count, duration, Problem, DASH, recorded} from '/static/lib.js';

const SORTS = [['newest', 'newest'], ['reward', 'reward'], ['staleness', 'staleness'], ['tokens', 'tokens'], ['sampled', 'tokens sampled'], ['turns', 'turns'], ['seconds', 'seconds'], ['trained_at', 'version trained']];
const SOURCES = [['', 'to be trained on'], ['failed', 'failed'], ['evaluation', 'evaluations'], ['evaluation_failed', 'failed evaluations']];
const STATES = ['leased', 'ready', 'batched', 'trained', 'discarded'];

// Typed text is its own until it is confirmed, whatever changes around it.
function Field({text, value = '', set, ...given}) {
  const [typed, type] = useState(value);
  useEffect(() => type(value), [value]);
  return html`<label>${text}<input value=${typed} inputmode="decimal" ...${given} onInput=${event => type(event.target.value)} onChange=${event => set(event.target.value.trim())} /></label>`;
}
const Choice = ({text, value = '', values, set}) => html`<label>${text}<select value=${value} onChange=${event => set(event.target.value)}><option value="">all</option>${values.map(one => html`<option key=${one} value=${one}>${one}</option>`)}</select></label>`;

export function Trajectories({run, query}) {
  const change = useLive().changes[run.name];
  const [more, setMore] = useState({of: '', pages: []});
  const url = api(run.name, 'trajectories', query);
  const {data, error, loading} = useData(url, change);
  const set = changes => go(run.name, 'trajectories', '', {...query, ...changes});
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="muted">reading the index of all trajectories</p>`;
  const of = {source: query.source};
  // A list that was continued stays as it was: what the first page would lose to newer rows is on none of the others.
  const pages = more.of === url && more.pages.length ? more.pages : [data];
  const rows = pages.flatMap(page => page.rows), next = pages[pages.length - 1].next, newer = data.indexed - pages[0].indexed;
  const follow = () => get(api(run.name, 'trajectories', {...query, after: next})).then(page => setMore({of: url, pages: [...pages, page]}));
  return html`<h1>${run.name}</h1><div class="card">
    <div class="filters">
      ${!recorded && html`<label>show<select value=${query.source || ''} onChange=${event => set({source: event.target.value, outcome: ''})}>${SOURCES.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select></label>`}
      <label>sort by<select value=${query.sort || 'newest'} onChange=${event => set({sort: event.target.value})}>${SORTS.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select></label>
      <label>order<select value=${query.ascending || ''} onChange=${event => set({ascending: event.target.value})}><option value="">largest first</option><option value="true">smallest first</option></select></label>
      <${Choice} value=${query.outcome} set=${value => set({outcome: value})} text="outcome" values=${data.outcomes} />
      ${data.envs.length > 1 && html`<${Choice} value=${query.env} set=${value => set({env: value})} text="environment" values=${data.envs} />`}
      <${Choice} value=${query.state} set=${value => set({state: value})} text="group is" values=${STATES} />
      <${Field} value=${query.reward_min} set=${value => set({reward_min: value})} text="reward from" />
      <${Field} value=${query.reward_max} set=${value => set({reward_max: value})} text="reward to" />
      <${Field} value=${query.staleness_min} set=${value => set({staleness_min: value})} text="staleness from" />
      <${Field} value=${query.tokens_min} set=${value => set({tokens_min: value})} text="tokens from" />
      <${Field} value=${query.turns_min} set=${value => set({turns_min: value})} text="turns from" />
      <${Field} value=${query.trained_at} set=${value => set({trained_at: value})} text="trained into version" />
      <${Field} value=${query.task} set=${value => set({task: value})} text="task contains" inputmode="text" />
    </div>
    <p class="small muted" aria-live="polite"><b>${data.total}</b> of ${data.indexed} trajectories ${Object.keys(query).length > 0 && html`<a href=${link(run.name, 'trajectories')}>show all</a>`} ${loading && 'reading'}${newer > 0 && html`<button onClick=${() => setMore({of: '', pages: []})}>show ${newer} newer</button>`}${recorded && ' · the file has a sample, evenly over the run: of some steps groups whose rewards differ'}</p>
    <div class="scroll"><table><thead><tr><th>id</th><th class="text">task</th><th>reward</th><th class="text">outcome</th><th>turns</th><th>tokens</th><th>sampled</th><th>time</th><th>versions</th><th>trained at</th><th>staleness</th><th class="text">group</th></tr></thead>
    <tbody>${rows.map(row => html`<tr key=${row.id} class="link" onClick=${() => go(run.name, 'trajectory', row.id, of)}>
      <td><a href=${link(run.name, 'trajectory', row.id, of)}>${row.id}</a></td><td class="text task" title=${row.task}>${row.task}</td><td>${count(row.reward)}</td><td class="text ${row.detail && 'wrap'}">${row.outcome}${row.detail && html` <span class="muted">${row.detail}</span>`}</td>
      <td>${row.turns}</td><td>${row.tokens}</td><td>${row.sampled}</td><td>${duration(row.seconds)}</td>
      <td>${row.oldest < 0 ? DASH : row.oldest === row.newest ? row.newest : `${row.oldest}–${row.newest}`}</td><td>${row.trained_at ?? DASH}</td><td>${row.staleness ?? DASH}</td>
      <td class="text"><a href=${link(run.name, 'group', row.group, of)} onClick=${event => event.stopPropagation()}>${row.group}</a> <span class="muted">${row.evaluation || row.state}</span></td></tr>`)}</tbody></table></div>
    ${rows.length === 0 && html`<p>${data.indexed ? 'None matches.' : 'No trajectory has been delivered.'}</p>`}
    ${next && html`<p><button onClick=${follow}>show more</button></p>`}</div>`;
}
