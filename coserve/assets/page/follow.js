// A job's events, from its first to its end, as series for charts.

import { events, request } from "./api.js";
import { sleep } from "./dom.js";

const LOG = 200;
const AGAIN = 2000;

export class Follower {
  /** `changed` is called after each event. */
  constructor(id, changed) {
    Object.assign(this, { id, changed, seq: 0, steps: [], samples: new Map(), log: [], state: null });
    this.leaving = new AbortController();
    this.run();
  }

  stop() {
    this.leaving.abort();
  }

  /** Follow to the job's end, also through a restart of the daemon: events go on after the last one seen. */
  async run() {
    while (!this.leaving.signal.aborted && !["succeeded", "failed", "cancelled"].includes(this.state)) {
      try {
        const response = await request(`/finetune/${this.id}/events?after=${this.seq}`, {
          headers: { Accept: "text/event-stream" }, signal: this.leaving.signal,
        });
        for await (const event of events(response)) this.take(event);
      } catch (error) {
        if (error.status === 404 || error.status === 401) return this.take({ seq: this.seq, state: error.message });
        await sleep(AGAIN);
      }
    }
  }

  /** Add an event, and tell. */
  take(event) {
    this.seq = event.seq;
    if (event.metrics) {
      while (this.steps.length && this.steps.at(-1).step >= event.metrics.step) this.steps.pop(); // resumed from a checkpoint
      this.steps.push(event.metrics);
    }
    if (event.sample) this.samples.set(`${event.sample.step}.${event.sample.prompt}`, event.sample);
    if (event.state) this.state = event.state;
    if (event.message && event.type !== "metrics" && event.type !== "sample") this.log.push(event);
    if (this.log.length > LOG) this.log.shift();
    this.changed(event);
  }

  /** `[[step, value], ...]` of a metric, where it was measured. */
  series(name) {
    return this.steps.filter((one) => one[name] !== null && one[name] !== undefined).map((one) => [one.step, one[name]]);
  }
}
