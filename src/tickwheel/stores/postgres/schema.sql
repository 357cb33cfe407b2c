-- The PostgreSQL store's schema. Change it only by a further numbered part at the end: a part runs
-- once, when the number in tickwheel.version is lower than its own, and tables in use are never
-- rewritten by hand. Where the store's URL names another schema, that takes the place of tickwheel.

-- part 1

create schema if not exists tickwheel;

create table tickwheel.version (version integer not null);
insert into tickwheel.version values (0);

create type tickwheel.state as enum ('waiting', 'running', 'done', 'dead', 'cancelled');

-- Room is left in each page, so that an extend finds some beside the row that it replaces.
create table tickwheel.job (
    n              bigint generated always as identity,
    due_ms         bigint   not null,
    created_ms     bigint   not null,
    fence          bigint   not null default 0,
    lease_until_ms bigint,
    watch_ms       bigint,                     -- no later than the lease's end: see job_running
    settled        bigint,
    ended_ms       bigint,
    timeout_ms     bigint,
    retries        integer,
    attempt        integer  not null default 0,
    failures       integer  not null default 0,
    takeovers      integer  not null default 0,
    state          tickwheel.state not null default 'waiting',
    priority       smallint not null check (priority between 0 and 3),
    asked          boolean  not null default false,
    id             text     not null collate "C" primary key,
    queue          text     not null collate "C",
    task           text     not null,
    worker         text     collate "C",
    payload        text     not null,          -- the arguments, JSON
    error          text,
    result         text,
    history        text     not null default '[]',
    check ((state = 'running') = (lease_until_ms is not null)),
    check ((state = 'running') = (watch_ms is not null)),
    check ((state in ('done', 'dead', 'cancelled')) = (ended_ms is not null)),
    check (state = 'running' or not asked)
) with (
    fillfactor = 85,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 1
);

-- A job stands in exactly one of these three, so each stays as small as what it is for: handing
-- out, finding lost leases, and paging or pruning what has ended.
create index job_waiting on tickwheel.job (queue, priority, due_ms, n) where state = 'waiting';
-- By the moment from which a lease is worth a look, which most extends leave alone: an update that
-- changes no indexed column touches no index.
create index job_running on tickwheel.job (queue, watch_ms, n) where state = 'running';
create index job_ended on tickwheel.job (state, queue, ended_ms, n) where ended_ms is not null;
create index job_asked on tickwheel.job (worker) where asked;

-- How many jobs stand where: the sum of these rows. Every statement adds its own differences, so
-- that no two writers ever wait for one another; now and then somebody folds many rows into few.
create table tickwheel.tally (
    queue text            not null collate "C",
    state tickwheel.state not null,
    jobs  bigint          not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

create table tickwheel.paused (queue text collate "C" primary key);

create table tickwheel.schedule (
    name    text    collate "C" primary key,
    rule    text    not null,
    next_ms bigint,
    paused  boolean not null,
    last_id text,
    fence   bigint  not null
);

create table tickwheel.worker (
    name    text   collate "C" primary key,
    info    text   not null,
    gone_ms bigint not null
) with (fillfactor = 50);

create table tickwheel.bucket (
    key        text   collate "C" primary key,
    full_at_ns bigint not null
) with (fillfactor = 50);

-- --- Counts and news, by triggers and not by the store's code: right whoever writes.

create function tickwheel.now_ms() returns bigint language sql as
    $$ select (extract(epoch from clock_timestamp()) * 1000)::bigint $$;

-- Wakes the workers that wait for a queue ('q' and its name). Names that are too long for a
-- notification wake all of them.
create function tickwheel.tell(kind text, name text) returns void language sql as
    $$ select pg_notify(
           'tickwheel', kind || case when octet_length(name) < 2000 then name else '' end) $$;

-- A commit that notifies waits for all others that do, so this is left out where it is of no use:
-- waiting workers look by themselves every two seconds, which is enough for a job that is due
-- later than in five; and while jobs are overdue nobody waits for more of them.
create function tickwheel.job_added() returns trigger language plpgsql as $$
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

create function tickwheel.job_moved() returns trigger language plpgsql as $$
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

create function tickwheel.job_forgotten() returns trigger language plpgsql as $$
begin
    insert into tickwheel.tally
        select queue, state, -count(*) from forgotten group by queue, state;
    return null;
end $$;

create trigger job_added after insert on tickwheel.job
    referencing new table as added
    for each statement execute function tickwheel.job_added();
create trigger job_moved after update on tickwheel.job
    referencing old table as before new table as after
    for each statement execute function tickwheel.job_moved();
create trigger job_forgotten after delete on tickwheel.job
    referencing old table as forgotten
    for each statement execute function tickwheel.job_forgotten();

-- --- For triggers and other languages

-- Adds a job in the transaction of its caller. Gives its id, or null where the id is taken.
-- It runs with the rights of its owner: a program that only adds jobs needs no right but this one.
create function tickwheel.enqueue(
    task     text,
    payload  jsonb       default '{}',
    delay    interval    default '0',
    queue    text        default 'default',
    priority integer     default 1,
    id       text        default null,
    due      timestamptz default null
) returns text language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
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

revoke execute on function tickwheel.enqueue from public;

-- part 2

alter table tickwheel.job add column started_ms bigint;  -- as far as the holder has told
