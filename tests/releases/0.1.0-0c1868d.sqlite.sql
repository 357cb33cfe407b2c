BEGIN TRANSACTION;
CREATE TABLE bucket (
    key        text    primary key,
    full_at_ns integer not null
) strict, without rowid;
CREATE TABLE clock (
    machine text    not null,
    wall_ns integer not null
) strict;
INSERT INTO "clock" VALUES('9e606145-34b5-4a5a-9152-b7cc674bfaa6 time:[4026531834]',1794909972405030089);
CREATE TABLE job (
    n              integer primary key,
    id             text    not null unique,
    task           text    not null,
    payload        text    not null,           -- the arguments, JSON
    queue          text    not null,
    priority       integer not null,
    due_ms         integer not null,
    created_ms     integer not null,
    retries        integer,
    timeout_ms     integer,
    state          text    not null default 'waiting',
    attempt        integer not null default 0,
    fence          integer not null default 0,
    failures       integer not null default 0,
    takeovers      integer not null default 0,
    worker         text,
    lease_until_ms integer,
    asked          integer not null default 0,
    settled        integer,
    ended_ms       integer,
    error          text,
    result         text,
    history        text    not null default '[]'
, started_ms integer) strict;
INSERT INTO "job" VALUES(1,'waiting','note','{"id": "waiting", "words": "\u5b9a\u65f6\u4efb\u52a1"}','default',1,1794914976679,1794914976679,3,60000,'waiting',0,0,0,0,NULL,NULL,0,NULL,NULL,NULL,NULL,'[]',NULL);
INSERT INTO "job" VALUES(2,'later','note','{"id": "later", "words": "\u5b9a\u65f6\u4efb\u52a1"}','default',1,1794918576679,1794914976679,3,60000,'waiting',0,0,0,0,NULL,NULL,0,NULL,NULL,NULL,NULL,'[]',NULL);
INSERT INTO "job" VALUES(3,'cancelled','note','{"id": "cancelled", "words": "\u5b9a\u65f6\u4efb\u52a1"}','default',1,1794914976679,1794914976679,3,60000,'cancelled',0,0,0,0,NULL,NULL,0,NULL,1794914976679,NULL,NULL,'[]',NULL);
INSERT INTO "job" VALUES(4,'paused','note','{"id": "paused", "words": "\u5b9a\u65f6\u4efb\u52a1"}','paused',1,1794914976679,1794914976679,3,60000,'waiting',0,0,0,0,NULL,NULL,0,NULL,NULL,NULL,NULL,'[]',NULL);
INSERT INTO "job" VALUES(5,'done','note','{"id": "done", "words": "\u5b9a\u65f6\u4efb\u52a1"}','done',1,1794914976679,1794914976679,3,60000,'done',1,7173405531010765,0,0,'ann',NULL,0,7173405531010765,1794914976679,NULL,'"done"','[{"attempt":1,"worker":"ann","outcome":"done","due_ms":1794914976679,"started_ms":1794914976679,"ended_ms":1794914976679}]',NULL);
INSERT INTO "job" VALUES(6,'retrying','note','{"id": "retrying", "words": "\u5b9a\u65f6\u4efb\u52a1"}','retrying',1,1794915036679,1794914976679,3,60000,'waiting',1,3549483797800934,1,0,'ann',NULL,0,3549483797800934,NULL,'boom',NULL,'[{"attempt":1,"worker":"ann","outcome":"retry","due_ms":1794914976679,"started_ms":1794914976679,"ended_ms":1794914976679,"error":"boom"}]',NULL);
INSERT INTO "job" VALUES(7,'snoozed','note','{"id": "snoozed", "words": "\u5b9a\u65f6\u4efb\u52a1"}','snoozed',1,1794915036679,1794914976679,3,60000,'waiting',1,3197979893365739,0,0,'ann',NULL,0,3197979893365739,NULL,NULL,NULL,'[{"attempt":1,"worker":"ann","outcome":"snooze","due_ms":1794914976679,"started_ms":1794914976679,"ended_ms":1794914976679}]',NULL);
INSERT INTO "job" VALUES(8,'released','note','{"id": "released", "words": "\u5b9a\u65f6\u4efb\u52a1"}','released',1,1794914976679,1794914976679,3,60000,'waiting',1,6087935593723350,0,0,'ann',NULL,0,6087935593723350,NULL,NULL,NULL,'[{"attempt":1,"worker":"ann","outcome":"release","due_ms":1794914976679,"ended_ms":1794914976679}]',NULL);
INSERT INTO "job" VALUES(9,'dead','note','{"id": "dead", "words": "\u5b9a\u65f6\u4efb\u52a1"}','dead',1,1794914976679,1794914976679,3,60000,'dead',1,7443203850558737,1,0,'ann',NULL,0,7443203850558737,1794914976679,'ValueError: no',NULL,'[{"attempt":1,"worker":"ann","outcome":"dead","due_ms":1794914976679,"started_ms":1794914976679,"ended_ms":1794914976679,"error":"ValueError: no"}]',NULL);
INSERT INTO "job" VALUES(10,'lost','note','{"id": "lost", "words": "\u5b9a\u65f6\u4efb\u52a1"}','lost',1,1794914976679,1794914976679,3,60000,'running',1,3378592980285282,0,0,'ann',1794915576679,0,NULL,NULL,NULL,NULL,'[]',NULL);
INSERT INTO "job" VALUES(11,'lost-started','note','{"id": "lost-started", "words": "\u5b9a\u65f6\u4efb\u52a1"}','lost-started',1,1794914976679,1794914976679,3,60000,'running',1,2136293163276102,0,0,'ann',1794915576679,0,NULL,NULL,NULL,NULL,'[]',1794914976679);
INSERT INTO "job" VALUES(12,'lost-asked','note','{"id": "lost-asked", "words": "\u5b9a\u65f6\u4efb\u52a1"}','lost-asked',1,1794914976679,1794914976679,3,60000,'running',1,1154404251220698,0,0,'ann',1794915576679,1,NULL,NULL,NULL,NULL,'[]',NULL);
CREATE TABLE paused (queue text primary key) strict, without rowid;
INSERT INTO "paused" VALUES('paused');
CREATE TABLE schedule (
    name    text    primary key,
    rule    text    not null,
    next_ms integer,
    paused  integer not null,
    last_id text,
    fence   integer not null
) strict, without rowid;
INSERT INTO "schedule" VALUES('cron','{"cron":"* * * * *","tz":"Asia/Taipei","task":"note","payload":"{\"id\":\"cron\",\"words\":\"tick\"}","from_code":true}',1794915036679,0,NULL,1939990598688725134);
INSERT INTO "schedule" VALUES('every','{"every_ms":60000,"task":"note","payload":"{\"id\":\"every\",\"words\":\"tick\"}"}',1794915036679,0,NULL,4007984260305181404);
INSERT INTO "schedule" VALUES('stopped','{"every_ms":60000,"task":"note","payload":"{\"id\":\"every\",\"words\":\"tick\"}"}',1794914976679,1,NULL,3083282447458681255);
CREATE TABLE tally (
    queue text    not null,
    state text    not null,
    jobs  integer not null,
    primary key (queue, state)
) strict, without rowid;
INSERT INTO "tally" VALUES('dead','dead',1);
INSERT INTO "tally" VALUES('dead','running',0);
INSERT INTO "tally" VALUES('dead','waiting',0);
INSERT INTO "tally" VALUES('default','cancelled',1);
INSERT INTO "tally" VALUES('default','waiting',2);
INSERT INTO "tally" VALUES('done','done',1);
INSERT INTO "tally" VALUES('done','running',0);
INSERT INTO "tally" VALUES('done','waiting',0);
INSERT INTO "tally" VALUES('lost','running',1);
INSERT INTO "tally" VALUES('lost','waiting',0);
INSERT INTO "tally" VALUES('lost-asked','running',1);
INSERT INTO "tally" VALUES('lost-asked','waiting',0);
INSERT INTO "tally" VALUES('lost-started','running',1);
INSERT INTO "tally" VALUES('lost-started','waiting',0);
INSERT INTO "tally" VALUES('paused','waiting',1);
INSERT INTO "tally" VALUES('released','running',0);
INSERT INTO "tally" VALUES('released','waiting',1);
INSERT INTO "tally" VALUES('retrying','running',0);
INSERT INTO "tally" VALUES('retrying','waiting',1);
INSERT INTO "tally" VALUES('snoozed','running',0);
INSERT INTO "tally" VALUES('snoozed','waiting',1);
CREATE TABLE worker (
    name    text    primary key,
    info    text    not null,
    gone_ms integer not null
) strict, without rowid;
INSERT INTO "worker" VALUES('ann','{"name":"ann","host":"host","pid":1,"version":"0.1.0","queues":["default"],"concurrency":100,"started_ms":1794914976679,"seen_ms":1794914976679,"gone_after_ms":600000,"held":0,"running":0,"offset_ms":0,"schedules":[]}',1794915576679);
CREATE INDEX job_waiting on job (queue, priority, due_ms) where state = 'waiting';
CREATE INDEX job_running on job (queue, lease_until_ms) where state = 'running';
CREATE INDEX job_ended on job (state, queue, ended_ms) where ended_ms is not null;
CREATE INDEX job_asked on job (worker) where asked = 1;
CREATE TRIGGER job_added after insert on job begin
    insert into tally values (new.queue, new.state, 1)
        on conflict do update set jobs = jobs + 1;
end;
CREATE TRIGGER job_moved after update of state on job when old.state <> new.state begin
    update tally set jobs = jobs - 1 where queue = old.queue and state = old.state;
    insert into tally values (new.queue, new.state, 1)
        on conflict do update set jobs = jobs + 1;
end;
CREATE TRIGGER job_forgotten after delete on job begin
    update tally set jobs = jobs - 1 where queue = old.queue and state = old.state;
end;
COMMIT;
pragma user_version = 2;
