// The members of a group beside each other: what the policy said to the same task, and what it got for it.
import {html, useState, useEffect, useRun, go, link, count, duration, Chip, Problem} from '/static/lib.js';

export function Group({run, id, query}) {
  const of = {source: query.source}, {data, error} = useRun(run.name, `groups/${id}`, of);
  const [best, setBest] = useState(false), [whole, setWhole] = useState(false);
  useEffect(() => {
    const pressed = event => {
      if (event.target.closest('input, select') || !data) return;
      if (event.key === '[' && data.previous != null) go(run.name, 'group', data.previous, of);
      if (event.key === ']' && data.next != null) go(run.name, 'group', data.next, of);
    };
    addEventListener('keydown', pressed);
    return () => removeEventListener('keydown', pressed);
  });
  if (error) return html`<${Problem} error=${error} />`;
  if (!data || String(data.id) !== id) return html`<p class="muted">reading</p>`;
  const members = best ? [...data.members].sort((a, b) => b.reward - a.reward) : data.members;
  const rewards = [...new Set(members.filter(one => !one.outcome.startsWith('failed')).map(one => one.reward))];
  const step = (to, text, label) => html`<button disabled=${to == null} aria-label=${label} onClick=${() => go(run.name, 'group', to, of)}>${text}</button>`;
  return html`<div class="row"><h1>group ${data.id}</h1>${step(data.previous, '◀', 'previous group')}${step(data.next, '▶', 'next group')}</div>
    <div class="card"><div class="chips"><${Chip} name="task">${data.task}<//><${Chip} name="is">${data.state}<//><${Chip} name="members">${members.length}<//>
      <${Chip} name="leased at">version ${data.leased_at}<//>${data.trained_at != null && html`<${Chip} name="trained into">version ${data.trained_at}<//>`}
      ${data.ready_time != null && data.leased_time != null && html`<${Chip} name="complete after">${duration(data.ready_time - data.leased_time)}<//>`}
      ${data.ready_time != null && data.taken_time != null && html`<${Chip} name="taken after">${duration(data.taken_time - data.ready_time)}<//>`}</div>
      ${members.length > 1 && rewards.length === 1 && html`<p class="legend-note">All rewards are ${count(rewards[0])}: an advantage that compares the members finds no difference.</p>`}
      ${data.prompt.map((message, i) => html`<div class="message" key=${i}><div class="who">${message.role || 'given'}</div><pre>${whole || message.text.length < 700 ? message.text : message.text.slice(0, 700) + ' …'}</pre></div>`)}</div>
    <div class="row card"><button class=${best ? 'on' : ''} onClick=${() => setBest(!best)}>best first</button><button class=${whole ? 'on' : ''} onClick=${() => setWhole(!whole)}>whole texts</button></div>
    <div class="members">${members.map(one => html`<div class="card" key=${one.id}>
      <h2><a href=${link(run.name, 'trajectory', one.id, of)}>${one.id}</a></h2>
      <div class="chips"><${Chip} name="reward">${count(one.reward)}<//><${Chip} name="">${one.outcome}<//><${Chip} name="tokens">${one.sampled}<//><${Chip} name="took">${duration(one.seconds)}<//><${Chip} name="versions">${one.versions.join(', ')}<//>${one.withheld && html`<${Chip} name="no loss">${one.withheld}<//>`}</div>
      ${one.detail && html`<pre class="log">${one.detail}</pre>`}
      ${one.texts.map((text, i) => html`<div class="message sampled" key=${i}><div class="who">turn ${i + 1}</div><pre>${whole || text.length < 500 ? text : text.slice(0, 500) + ' …'}</pre></div>`)}
      ${!one.texts.length && html`<p class="muted">its tokens are not in the buffer any more</p>`}</div>`)}</div>`;
}
