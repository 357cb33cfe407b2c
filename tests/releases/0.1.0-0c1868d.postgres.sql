SELECT pg_catalog.set_config('search_path', '', false);
CREATE SCHEMA tickwheel;
CREATE TYPE tickwheel.state AS ENUM (
    'waiting',
    'running',
    'done',
    'dead',
    'cancelled'
);
CREATE FUNCTION tickwheel.enqueue(task text, payload jsonb DEFAULT '{}'::jsonb, delay interval DEFAULT '00:00:00'::interval, queue text DEFAULT 'default'::text, priority integer DEFAULT 1, id text DEFAULT NULL::text, due timestamp with time zone DEFAULT NULL::timestamp with time zone) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
    now bigint := ceil(extract(epoch from clock_timestamp()) * 1000);
    random text := gen_random_uuid()::text;
    added text;
begin
    if jsonb_typeof(payload) <> 'object' then
        raise 'payload: an object of arguments by their names, as {"order_id": 42}'
            using errcode = 'invalid_parameter_value';
    end if;
    insert into tickwheel.job as j (id, task, payload, queue, priority, due_ms, created_ms)
    values (
        coalesce(enqueue.id, lpad(to_hex(now), 11, '0') || left(random, 8) || right(random, 8)),
        enqueue.task, enqueue.payload::text, enqueue.queue, enqueue.priority,
        coalesce(ceil(extract(epoch from enqueue.due) * 1000),
                 now + ceil(extract(epoch from enqueue.delay) * 1000)),
        now)
    on conflict do nothing
    returning j.id into added;
    return added;
end $$;
CREATE FUNCTION tickwheel.job_added() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
declare
    now bigint := tickwheel.now_ms();
    first bigint;
    each text;
begin
    insert into tickwheel.tally
        select queue, state, count(*) from added group by queue, state;
    for each, first in
        select queue, min(n) from added where due_ms <= now + 5000 group by queue
    loop
        if not exists (
            select from generate_series(0, 3) as level(priority), lateral (
                select from tickwheel.job
                where state = 'waiting' and job.queue = each and job.priority = level.priority
                  and due_ms < now - 250 and n < first
                limit 1) as overdue)
        then
            perform tickwheel.tell('q', each);
        end if;
    end loop;
    return null;
end $$;
CREATE FUNCTION tickwheel.job_forgotten() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
begin
    insert into tickwheel.tally
        select queue, state, -count(*) from forgotten group by queue, state;
    return null;
end $$;
CREATE FUNCTION tickwheel.job_moved() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
begin
    insert into tickwheel.tally
        select queue, state, sum(jobs) from (
            select queue, state, count(*) as jobs from after group by queue, state
            union all
            select queue, state, -count(*) from before group by queue, state) as moved
        group by queue, state having sum(jobs) <> 0;
    perform tickwheel.tell(kind, name) from (
        select distinct 'q' as kind, queue as name from after
        where state = 'waiting' and due_ms <= tickwheel.now_ms() + 5000
        union
        select distinct 'a', worker from after where asked and state = 'running') as news;
    return null;
end $$;
CREATE FUNCTION tickwheel.now_ms() RETURNS bigint
    LANGUAGE sql
    AS $$ select (extract(epoch from clock_timestamp()) * 1000)::bigint $$;
CREATE FUNCTION tickwheel.tell(kind text, name text) RETURNS void
    LANGUAGE sql
    AS $$ select pg_notify(
           'tickwheel', kind || case when octet_length(name) < 2000 then name else '' end) $$;
CREATE TABLE tickwheel.bucket (
    key text NOT NULL COLLATE pg_catalog."C",
    full_at_ns bigint NOT NULL
)
WITH (fillfactor='50');
CREATE TABLE tickwheel.job (
    n bigint NOT NULL,
    due_ms bigint NOT NULL,
    created_ms bigint NOT NULL,
    fence bigint DEFAULT 0 NOT NULL,
    lease_until_ms bigint,
    watch_ms bigint,
    settled bigint,
    ended_ms bigint,
    timeout_ms bigint,
    retries integer,
    attempt integer DEFAULT 0 NOT NULL,
    failures integer DEFAULT 0 NOT NULL,
    takeovers integer DEFAULT 0 NOT NULL,
    state tickwheel.state DEFAULT 'waiting'::tickwheel.state NOT NULL,
    priority smallint NOT NULL,
    asked boolean DEFAULT false NOT NULL,
    id text NOT NULL COLLATE pg_catalog."C",
    queue text NOT NULL COLLATE pg_catalog."C",
    task text NOT NULL,
    worker text COLLATE pg_catalog."C",
    payload text NOT NULL,
    error text,
    result text,
    history text DEFAULT '[]'::text NOT NULL,
    started_ms bigint,
    CONSTRAINT job_check CHECK (((state = 'running'::tickwheel.state) = (lease_until_ms IS NOT NULL))),
    CONSTRAINT job_check1 CHECK (((state = 'running'::tickwheel.state) = (watch_ms IS NOT NULL))),
    CONSTRAINT job_check2 CHECK (((state = ANY (ARRAY['done'::tickwheel.state, 'dead'::tickwheel.state, 'cancelled'::tickwheel.state])) = (ended_ms IS NOT NULL))),
    CONSTRAINT job_check3 CHECK (((state = 'running'::tickwheel.state) OR (NOT asked))),
    CONSTRAINT job_priority_check CHECK (((priority >= 0) AND (priority <= 3)))
)
WITH (fillfactor='85', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='5000', autovacuum_analyze_scale_factor='0.05', autovacuum_vacuum_cost_delay='1');
ALTER TABLE tickwheel.job ALTER COLUMN n ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME tickwheel.job_n_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE tickwheel.paused (
    queue text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE tickwheel.schedule (
    name text NOT NULL COLLATE pg_catalog."C",
    rule text NOT NULL,
    next_ms bigint,
    paused boolean NOT NULL,
    last_id text,
    fence bigint NOT NULL
);
CREATE TABLE tickwheel.tally (
    queue text NOT NULL COLLATE pg_catalog."C",
    state tickwheel.state NOT NULL,
    jobs bigint NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000');
CREATE TABLE tickwheel.version (
    version integer NOT NULL
);
CREATE TABLE tickwheel.worker (
    name text NOT NULL COLLATE pg_catalog."C",
    info text NOT NULL,
    gone_ms bigint NOT NULL
)
WITH (fillfactor='50');
INSERT INTO tickwheel.job OVERRIDING SYSTEM VALUE VALUES (2, 1794918577931, 1794914977931, 0, NULL, NULL, NULL, NULL, 60000, 3, 0, 0, 0, 'waiting', 1, false, 'later', 'default', 'note', NULL, '{"id": "later", "words": "\u5b9a\u65f6\u4efb\u52a1"}', NULL, NULL, '[]', NULL);
INSERT INTO tickwheel.job OVERRIDING SYSTEM VALUE VALUES (3, 1794914977931, 1794914977931, 0, NULL, NULL, NULL, NULL, 60000, 3, 0, 0, 0, 'waiting', 1, false, 'waiting', 'default', 'note', NULL, '{"id": "waiting", "words": "\u5b9a\u65f6\u4efb\u52a1"}', NULL, NULL, '[]', NULL);
INSERT INTO tickwheel.job OVERRIDING SYSTEM VALUE VALUES (4, 1794914977931, 1794914977931, 0, NULL, NULL, NULL, NULL, 60000, 3, 0, 0, 0, 'waiting', 1, false, 'paused', 'paused', 'note', NULL, '{"id": "paused", "words": "\u5b9a\u65f6\u4efb\u52a1"}', NULL, NULL, '[]', NULL);
INSERT INTO tickwheel.job OVERRIDING SYSTEM VALUE VALUES (1, 1794914977931, 1794914977931, 0, NULL, NULL, NULL, 1794914977931, 60000, 3, 0, 0, 0, 'cancelled', 1, false, 'cancelled', 'default', 'note', NULL, '{"id": "cancelled", "words": "\u5b9a\u65f6\u4efb\u52a1"}', NULL, NULL, '[]', NULL);
INSERT INTO tickwheel.job OVERRIDING SYSTEM VALUE VALUES (5, 1794914977931, 1794914977931, 2383626713713622, NULL, NULL, 2383626713713622, 1794914977931, 60000, 3, 1, 0, 0, 'done', 1, false, 'done', 'done', 'note', 'ann', '{"id": "done", "words": "\u5b9a\u65f6\u4efb\u52a1"}', NULL, '"done"', '[{"attempt":1,"worker":"ann","outcome":"done","due_ms":1794914977931,"started_ms":1794914977931,"ended_ms":1794914977931}]', NULL);
INSERT INTO tickwheel.job OVERRIDING SYSTEM VALUE VALUES (6, 1794915037931, 1794914977931, 2362638827428054, NULL, NULL, 2362638827428054, NULL, 60000, 3, 1, 1, 0, 'waiting', 1, false, 'retrying', 'retrying', 'note', 'ann', '{"id": "retrying", "words": "\u5b9a\u65f6\u4efb\u52a1"}', 'boom', NULL, '[{"attempt":1,"worker":"ann","outcome":"retry","due_ms":1794914977931,"started_ms":1794914977931,"ended_ms":1794914977931,"error":"boom"}]', NULL);
INSERT INTO tickwheel.job OVERRIDING SYSTEM VALUE VALUES (7, 1794915037931, 1794914977931, 8513071636598149, NULL, NULL, 8513071636598149, NULL, 60000, 3, 1, 0, 0, 'waiting', 1, false, 'snoozed', 'snoozed', 'note', 'ann', '{"id": "snoozed", "words": "\u5b9a\u65f6\u4efb\u52a1"}', NULL, NULL, '[{"attempt":1,"worker":"ann","outcome":"snooze","due_ms":1794914977931,"started_ms":1794914977931,"ended_ms":1794914977931}]', NULL);
INSERT INTO tickwheel.job OVERRIDING SYSTEM VALUE VALUES (8, 1794914977931, 1794914977931, 4284375041228175, NULL, NULL, 4284375041228175, NULL, 60000, 3, 1, 0, 0, 'waiting', 1, false, 'released', 'released', 'note', 'ann', '{"id": "released", "words": "\u5b9a\u65f6\u4efb\u52a1"}', NULL, NULL, '[{"attempt":1,"worker":"ann","outcome":"release","due_ms":1794914977931,"ended_ms":1794914977931}]', NULL);
INSERT INTO tickwheel.job OVERRIDING SYSTEM VALUE VALUES (9, 1794914977931, 1794914977931, 4727618476806375, NULL, NULL, 4727618476806375, 1794914977931, 60000, 3, 1, 1, 0, 'dead', 1, false, 'dead', 'dead', 'note', 'ann', '{"id": "dead", "words": "\u5b9a\u65f6\u4efb\u52a1"}', 'ValueError: no', NULL, '[{"attempt":1,"worker":"ann","outcome":"dead","due_ms":1794914977931,"started_ms":1794914977931,"ended_ms":1794914977931,"error":"ValueError: no"}]', NULL);
INSERT INTO tickwheel.job OVERRIDING SYSTEM VALUE VALUES (10, 1794914977931, 1794914977931, 1645470771171591, 1794915577931, 1794915577931, NULL, NULL, 60000, 3, 1, 0, 0, 'running', 1, false, 'lost', 'lost', 'note', 'ann', '{"id": "lost", "words": "\u5b9a\u65f6\u4efb\u52a1"}', NULL, NULL, '[]', NULL);
INSERT INTO tickwheel.job OVERRIDING SYSTEM VALUE VALUES (11, 1794914977931, 1794914977931, 6921942175573967, 1794915577931, 1794915577931, NULL, NULL, 60000, 3, 1, 0, 0, 'running', 1, false, 'lost-started', 'lost-started', 'note', 'ann', '{"id": "lost-started", "words": "\u5b9a\u65f6\u4efb\u52a1"}', NULL, NULL, '[]', 1794914977931);
INSERT INTO tickwheel.job OVERRIDING SYSTEM VALUE VALUES (12, 1794914977931, 1794914977931, 7781119879000351, 1794915577931, 1794915577931, NULL, NULL, 60000, 3, 1, 0, 0, 'running', 1, true, 'lost-asked', 'lost-asked', 'note', 'ann', '{"id": "lost-asked", "words": "\u5b9a\u65f6\u4efb\u52a1"}', NULL, NULL, '[]', NULL);
INSERT INTO tickwheel.paused VALUES ('paused');
INSERT INTO tickwheel.schedule VALUES ('every', '{"every_ms":60000,"task":"note","payload":"{\"id\":\"every\",\"words\":\"tick\"}"}', 1794915037931, false, NULL, 3435411674950990);
INSERT INTO tickwheel.schedule VALUES ('cron', '{"cron":"* * * * *","tz":"Asia/Taipei","task":"note","payload":"{\"id\":\"cron\",\"words\":\"tick\"}","from_code":true}', 1794915037931, false, NULL, 8437372054862733);
INSERT INTO tickwheel.schedule VALUES ('stopped', '{"every_ms":60000,"task":"note","payload":"{\"id\":\"every\",\"words\":\"tick\"}"}', 1794914977931, true, NULL, 7770051227163147);
INSERT INTO tickwheel.tally VALUES ('default', 'waiting', 3);
INSERT INTO tickwheel.tally VALUES ('paused', 'waiting', 1);
INSERT INTO tickwheel.tally VALUES ('default', 'cancelled', 1);
INSERT INTO tickwheel.tally VALUES ('default', 'waiting', -1);
INSERT INTO tickwheel.tally VALUES ('done', 'waiting', 1);
INSERT INTO tickwheel.tally VALUES ('done', 'waiting', -1);
INSERT INTO tickwheel.tally VALUES ('done', 'running', 1);
INSERT INTO tickwheel.tally VALUES ('done', 'running', -1);
INSERT INTO tickwheel.tally VALUES ('done', 'done', 1);
INSERT INTO tickwheel.tally VALUES ('retrying', 'waiting', 1);
INSERT INTO tickwheel.tally VALUES ('retrying', 'waiting', -1);
INSERT INTO tickwheel.tally VALUES ('retrying', 'running', 1);
INSERT INTO tickwheel.tally VALUES ('retrying', 'running', -1);
INSERT INTO tickwheel.tally VALUES ('retrying', 'waiting', 1);
INSERT INTO tickwheel.tally VALUES ('snoozed', 'waiting', 1);
INSERT INTO tickwheel.tally VALUES ('snoozed', 'running', 1);
INSERT INTO tickwheel.tally VALUES ('snoozed', 'waiting', -1);
INSERT INTO tickwheel.tally VALUES ('snoozed', 'running', -1);
INSERT INTO tickwheel.tally VALUES ('snoozed', 'waiting', 1);
INSERT INTO tickwheel.tally VALUES ('released', 'waiting', 1);
INSERT INTO tickwheel.tally VALUES ('released', 'running', 1);
INSERT INTO tickwheel.tally VALUES ('released', 'waiting', -1);
INSERT INTO tickwheel.tally VALUES ('released', 'running', -1);
INSERT INTO tickwheel.tally VALUES ('released', 'waiting', 1);
INSERT INTO tickwheel.tally VALUES ('dead', 'waiting', 1);
INSERT INTO tickwheel.tally VALUES ('dead', 'waiting', -1);
INSERT INTO tickwheel.tally VALUES ('dead', 'running', 1);
INSERT INTO tickwheel.tally VALUES ('dead', 'running', -1);
INSERT INTO tickwheel.tally VALUES ('dead', 'dead', 1);
INSERT INTO tickwheel.tally VALUES ('lost', 'waiting', 1);
INSERT INTO tickwheel.tally VALUES ('lost', 'waiting', -1);
INSERT INTO tickwheel.tally VALUES ('lost', 'running', 1);
INSERT INTO tickwheel.tally VALUES ('lost-started', 'waiting', 1);
INSERT INTO tickwheel.tally VALUES ('lost-started', 'waiting', -1);
INSERT INTO tickwheel.tally VALUES ('lost-started', 'running', 1);
INSERT INTO tickwheel.tally VALUES ('lost-asked', 'waiting', 1);
INSERT INTO tickwheel.tally VALUES ('lost-asked', 'waiting', -1);
INSERT INTO tickwheel.tally VALUES ('lost-asked', 'running', 1);
INSERT INTO tickwheel.version VALUES (2);
INSERT INTO tickwheel.worker VALUES ('ann', '{"name":"ann","host":"host","pid":1,"version":"0.1.0","queues":["default"],"concurrency":100,"started_ms":1794914977931,"seen_ms":1794914977931,"gone_after_ms":600000,"held":0,"running":0,"offset_ms":0,"schedules":[]}', 1794915577931);
SELECT pg_catalog.setval('tickwheel.job_n_seq', 12, true);
ALTER TABLE ONLY tickwheel.bucket
    ADD CONSTRAINT bucket_pkey PRIMARY KEY (key);
ALTER TABLE ONLY tickwheel.job
    ADD CONSTRAINT job_pkey PRIMARY KEY (id);
ALTER TABLE ONLY tickwheel.paused
    ADD CONSTRAINT paused_pkey PRIMARY KEY (queue);
ALTER TABLE ONLY tickwheel.schedule
    ADD CONSTRAINT schedule_pkey PRIMARY KEY (name);
ALTER TABLE ONLY tickwheel.worker
    ADD CONSTRAINT worker_pkey PRIMARY KEY (name);
CREATE INDEX job_asked ON tickwheel.job USING btree (worker) WHERE asked;
CREATE INDEX job_ended ON tickwheel.job USING btree (state, queue, ended_ms, n) WHERE (ended_ms IS NOT NULL);
CREATE INDEX job_running ON tickwheel.job USING btree (queue, watch_ms, n) WHERE (state = 'running'::tickwheel.state);
CREATE INDEX job_waiting ON tickwheel.job USING btree (queue, priority, due_ms, n) WHERE (state = 'waiting'::tickwheel.state);
CREATE TRIGGER job_added AFTER INSERT ON tickwheel.job REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION tickwheel.job_added();
CREATE TRIGGER job_forgotten AFTER DELETE ON tickwheel.job REFERENCING OLD TABLE AS forgotten FOR EACH STATEMENT EXECUTE FUNCTION tickwheel.job_forgotten();
CREATE TRIGGER job_moved AFTER UPDATE ON tickwheel.job REFERENCING OLD TABLE AS before NEW TABLE AS after FOR EACH STATEMENT EXECUTE FUNCTION tickwheel.job_moved();
REVOKE ALL ON FUNCTION tickwheel.enqueue(task text, payload jsonb, delay interval, queue text, priority integer, id text, due timestamp with time zone) FROM PUBLIC;
