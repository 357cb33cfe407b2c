-- The PostgreSQL store's schema. Change it only by a further numbered part at the end: a part runs
-- once, when the number in tickwheel.version is lower than its own, and tables in use are never
-- rewritten by hand. If the store's URL names another schema, its name replaces tickwheel.

-- part 1

create schema if not exists tickwheel;

create table tickwheel.version (version integer not null);
insert into tickwheel.version values (0);

create type tickwheel.state as enum ('waiting', 'running', 'done', 'dead', 'cancelled');

-- Space is left in each page, so that an extend finds some next to the row that it replaces.
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

-- A job is in exactly one of these three, so each stays small: for claiming, for finding leases that
-- have run out, and for paging through and pruning ended jobs.
create index job_waiting on tickwheel.job (queue, priority, due_ms, n) where state = 'waiting';
-- By the moment from which the lease must be checked, which most extends leave alone: an update that
-- changes no indexed column touches no index.
create index job_running on tickwheel.job (queue, watch_ms, n) where state = 'running';
create index job_ended on tickwheel.job (state, queue, ended_ms, n) where ended_ms is not null;
create index job_asked on tickwheel.job (worker) where asked;

-- How many jobs each queue has in each state: the sum of these rows. Every statement adds its own
-- differences, so that writers never wait for one another; now and then many rows are folded into few.
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

-- --- Counts and notifications, by triggers and not by the store's code: right whoever writes.

create function tickwheel.now_ms() returns bigint language sql as
    $$ select (extract(epoch from clock_timestamp()) * 1000)::bigint $$;

-- Wakes the workers that wait for a queue ('q' and its name). Names that are too long for a
-- notification wake all of them.
create function tickwheel.tell(kind text, name text) returns void language sql as
    $$ select pg_notify(
           'tickwheel', kind || case when octet_length(name) < 2000 then name else '' end) $$;

-- A commit that notifies waits for all others that do, so it is left out if it is of no use: waiting
-- workers check by themselves every two seconds, which is enough for a job that is due in more than
-- five; and while jobs are overdue, nobody waits for more of them.
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

-- Adds a job in the caller's transaction. Returns its id, or null if the id is taken.
-- It runs with its owner's privileges: a program that only adds jobs needs no privilege but this one.
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

alter table tickwheel.job add column started_ms bigint;  -- once the holder has told the store

-- part 3

-- Logical replication refuses updates and deletes in a table that has no key.
alter table tickwheel.version add primary key (version);
alter table tickwheel.tally add column n bigint generated always as identity primary key;

-- It runs in the users' sessions, which keep its plans from when there were few jobs, and may have no
-- statistics about the many that there are now. So it asks for the head of an index, and may use
-- indexes only.
create or replace function tickwheel.job_added() returns trigger language plpgsql
set enable_seqscan = off as $$
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
                select due_ms, n from tickwheel.job
                where state = 'waiting' and job.queue = each and job.priority = level.priority
                order by queue, priority, due_ms, n limit 1) as head
            where due_ms < now - 250 and n < first)
        then
            perform tickwheel.tell('q', each);
        end if;
    end loop;
    return null;
end $$;

-- What every store can keep, as tickwheel.checks has it.
create or replace function tickwheel.enqueue(
    task     text,
    payload  jsonb       default '{}',
    delay    interval    default '0',
    queue    text        default 'default',
    priority integer     default 1,
    id       text        default null,
    due      timestamptz default null
) returns text language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    name constant text := '^[A-Za-z0-9_.:-]{1,128}$';
    -- Control and format characters, line ends, spaces but for the common one, private use.
    unprintable constant text := '[\u0001-\u001f\u007f-\u00a0\u00ad\u0600-\u0605\u061c\u06dd\u070f'
        '\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u2064\u2066-\u206f\u3000'
        '\ue000-\uf8ff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U00013438'
        '\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f'
        '\U000f0000-\U000ffffd\U00100000-\U0010fffd]';
    now bigint := ceil(extract(epoch from clock_timestamp()) * 1000);
    -- Not an integer yet: it may be infinite.
    due_ms double precision := coalesce(ceil(extract(epoch from due) * 1000),
                                        now + ceil(extract(epoch from delay) * 1000));
    random text := gen_random_uuid()::text;
    wrong text;
    added text;
begin
    wrong := case
        when task is null or task !~ name then
            format('task => %L: a name is 1 to 128 letters, digits and _ . : -', left(task, 200))
        when queue is null or queue !~ name then
            format('queue => %L: a name is 1 to 128 letters, digits and _ . : -', left(queue, 200))
        when not length(id) between 1 and 200 or id ~ unprintable then
            format('id => %L: an id is 1 to 200 printable characters', left(id, 200))
        when priority is null or not priority between 0 and 3 then
            format('priority => %L: it is from 0 (low) to 3 (urgent)', priority)
        when jsonb_typeof(payload) is distinct from 'object' then
            'payload: an object of arguments by their names, as {"order_id": 42}'
        when due_ms is null then
            'delay: it is null; leave it out for now, or write delay => ''30 minutes'''
        when due is null and delay < '0' then
            format('delay => %L: it is negative; a delay is 0 or more', delay)
        when not due_ms between 0 and 253402300799999 then
            format('due => %L: it is not in the years 1970 to 9999',
                   coalesce(due::text, 'in ' || delay))
    end;
    if wrong is not null then
        raise '%', wrong using errcode = 'invalid_parameter_value';
    end if;
    insert into tickwheel.job as j (id, task, payload, queue, priority, due_ms, created_ms)
    values (
        coalesce(enqueue.id, lpad(to_hex(now), 11, '0') || left(random, 8) || right(random, 8)),
        enqueue.task, enqueue.payload::text, enqueue.queue, enqueue.priority,
        due_ms, now)
    on conflict do nothing
    returning j.id into added;
    return added;
end $$;

-- part 4

-- A job that is parked, for workers that know its task, has its priority less 4: claims, which go by
-- queue and priority, don't come across it, nor do those of an older release that still runs.
-- `priority & 3` is the job's own, parked or not. The check is not made for the jobs that are there:
-- they have passed a stricter one.
alter table tickwheel.job
    add column traceback text,
    drop constraint job_priority_check,
    add constraint job_priority_check check (priority between -4 and 3) not valid;

-- By an expression, so that the index of all waiting jobs is never as good.
create index job_parked on tickwheel.job (queue, task collate "C", (priority & 3), due_ms, n)
    where state = 'waiting' and priority < 0;

-- Parked jobs are news ('t' and the task's name) only for workers that know their task.
create or replace function tickwheel.job_moved() returns trigger language plpgsql as $$
begin
    insert into tickwheel.tally
        select queue, state, sum(jobs) from (
            select queue, state, count(*) as jobs from after group by queue, state
            union all
            select queue, state, -count(*) from before group by queue, state) as moved
        group by queue, state having sum(jobs) <> 0;
    perform tickwheel.tell(kind, name) from (
        select distinct 'q' as kind, queue as name from after
        where state = 'waiting' and priority >= 0 and due_ms <= tickwheel.now_ms() + 5000
        union
        select distinct 't', task from after
        where state = 'waiting' and priority < 0 and due_ms <= tickwheel.now_ms() + 5000
        union
        select distinct 'a', worker from after where asked and state = 'running') as news;
    return null;
end $$;

-- part 5

alter table tickwheel.job
    add column expires_ms bigint,
    add column meta text,      -- JSON, as is the next
    add column progress text;  -- of the last run, once the holder has told the store

-- Finds jobs by their meta, the latest first: a GIN index would sort all that match, for each page.
-- Kept by triggers, with the owner's privileges; a job without meta costs no call of theirs.
create table tickwheel.job_meta (
    name  text   not null collate "C",
    value text   not null collate "C",
    n     bigint not null,
    id    text   not null collate "C",
    primary key (name, value, n)
);

create function tickwheel.job_meta_added() returns trigger language plpgsql
security definer set search_path = pg_catalog, pg_temp as $$
begin
    insert into tickwheel.job_meta
        select key, value, new.n, new.id from json_each_text(new.meta::json);
    return null;
end $$;

-- Sessions may keep its plan from when the table was small, so it may only go by the key.
create function tickwheel.job_meta_forgotten() returns trigger language plpgsql
security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
begin
    delete from tickwheel.job_meta as old_one using json_each_text(old.meta::json) as pair
        where old_one.name = pair.key and old_one.value = pair.value and old_one.n = old.n;
    return null;
end $$;

revoke execute on function tickwheel.job_meta_added, tickwheel.job_meta_forgotten from public;

create trigger job_meta_added after insert on tickwheel.job
    for each row when (new.meta is not null) execute function tickwheel.job_meta_added();
create trigger job_meta_forgotten after delete on tickwheel.job
    for each row when (old.meta is not null) execute function tickwheel.job_meta_forgotten();

-- Whoever may read jobs may find them.
do $$
declare
    reader oid;
begin
    for reader in
        select distinct grantee from pg_class, aclexplode(relacl)
        where oid = 'tickwheel.job'::regclass and privilege_type = 'SELECT' and grantee <> relowner
    loop
        execute format('grant select on tickwheel.job_meta to %s',
                       case reader when 0 then 'public' else reader::regrole::text end);
    end loop;
end $$;

-- part 6

-- Until when somebody waits for the end of jobs: at most one row.
create table tickwheel.watched (
    one      boolean primary key default true check (one),
    until_ms bigint  not null
) with (fillfactor = 50);

-- Both run with their owner's privileges, so that no role needs further ones. The first notes that
-- somebody waits, for `ms` more, at most a minute; returns whether nobody did, so that what ends
-- meanwhile may be missed.
create function tickwheel.watch(ms bigint) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    now bigint := tickwheel.now_ms();
    was bigint := coalesce((select max(until_ms) from tickwheel.watched), 0);
begin
    -- Many may wait, so most of them leave the row alone.
    if was < now + ms / 2 then
        insert into tickwheel.watched (until_ms) values (now + least(ms, 60000))
        on conflict (one) do update
        set until_ms = greatest(watched.until_ms, excluded.until_ms);
    end if;
    return was < now;
end $$;

create function tickwheel.is_watched() returns boolean
language sql security definer set search_path = pg_catalog, pg_temp as
    $$ select exists (select from tickwheel.watched where until_ms > tickwheel.now_ms()) $$;

-- The ids of jobs that ended together, for whoever waits; 'l' (look) if they are too long.
create function tickwheel.job_ended() returns trigger language plpgsql as $$
begin
    if tickwheel.is_watched() then
        perform pg_notify(left('tickwheel', 57) || ':ends',
                          case when octet_length(ids) < 7900 then ids else 'l' end)
        from (
            select json_agg(id)::text as ids
            from (select id, row_number() over () / 200 as part from ended
                  where ended_ms is not null) as each
            group by part) as news;
    end if;
    return null;
end $$;

create trigger job_ended after update on tickwheel.job
    referencing new table as ended
    for each statement execute function tickwheel.job_ended();

-- part 7

-- Small named texts, such as API keys.
create table tickwheel.record (
    kind text not null collate "C",
    name text not null collate "C",
    body text not null,
    primary key (kind, name)
);

-- Whoever may do something with schedules may do the same with records.
do $$
declare
    reader oid;
    privilege text;
begin
    for reader, privilege in
        select distinct grantee, privilege_type from pg_class, aclexplode(relacl)
        where oid = 'tickwheel.schedule'::regclass and grantee <> relowner
          and privilege_type in ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    loop
        execute format('grant %s on tickwheel.record to %s', privilege,
                       case reader when 0 then 'public' else reader::regrole::text end);
    end loop;
end $$;

-- part 8

-- What others have asked of a job since it was added: JSON. `told` says that its holder is to put it
-- back, unless it has started.
alter table tickwheel.job
    add column changes text,
    add column told boolean not null default false;

create index job_told on tickwheel.job (worker) where told;

create or replace function tickwheel.job_moved() returns trigger language plpgsql as $$
begin
    insert into tickwheel.tally
        select queue, state, sum(jobs) from (
            select queue, state, count(*) as jobs from after group by queue, state
            union all
            select queue, state, -count(*) from before group by queue, state) as moved
        group by queue, state having sum(jobs) <> 0;
    perform tickwheel.tell(kind, name) from (
        select distinct 'q' as kind, queue as name from after
        where state = 'waiting' and priority >= 0 and due_ms <= tickwheel.now_ms() + 5000
        union
        select distinct 't', task from after
        where state = 'waiting' and priority < 0 and due_ms <= tickwheel.now_ms() + 5000
        union
        select distinct 'a', worker from after
        where (asked or told) and state = 'running') as news;
    return null;
end $$;

-- Only what replaces a job sets its meta, so no other update calls this.
create function tickwheel.job_meta_changed() returns trigger language plpgsql
security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
begin
    if old.meta is not null then
        delete from tickwheel.job_meta as old_one using json_each_text(old.meta::json) as pair
            where old_one.name = pair.key and old_one.value = pair.value and old_one.n = old.n;
    end if;
    if new.meta is not null then
        insert into tickwheel.job_meta
            select key, value, new.n, new.id from json_each_text(new.meta::json);
    end if;
    return null;
exception
    -- Another program has written something else as meta.
    when data_exception then return null;
end $$;

revoke execute on function tickwheel.job_meta_changed from public;

create trigger job_meta_changed after update of meta on tickwheel.job
    for each row when (old.meta is distinct from new.meta)
    execute function tickwheel.job_meta_changed();
