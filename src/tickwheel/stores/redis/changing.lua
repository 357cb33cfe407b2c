-- Changes that others ask for: a part of statements.lua, which describes the keys. It is the body of
-- a function that is called only by a step of these. The caller reads jobs, decides what becomes of
-- each (job.py, changes.py), and writes that, if nothing has changed since.

local TOLD = ROOT .. 'told'

-- What a job was when it was read; '' if it was unknown.
local function mark_of(record, lines)
  return record and redis.sha1hex(record .. '\n' .. (lines or '')) or ''
end

local change = {}

-- The records of the first ids, as many as one step may read; their lines, and their marks.
function change.seen(ids)
  local records, marks, lines, some = records_of(ids), {}, {}, {}
  for i = 1, #records do some[i] = ids[i] end
  local since = values(SINCE, some)
  for i = 1, #records do marks[i], lines[i] = mark_of(records[i], since[i]), since[i] end
  return {records, with_progress(some, lines), marks}
end

-- Where a job is now: set and member.
local function stands(id, record, lines)
  local place, state = place_of(record)
  local parked = not lines and parking().as(id, record)
  if parked then return parked_set(place:sub(3)), parked, place, state end
  state = lines and lines:sub(1, 1) or state
  return set_of(state, place), id, place, state
end

-- Each of these jobs, if it is still as its mark says, becomes what `afters` has for it: {state (p if
-- it is to be parked), place, score, record, meta (false if none), flag, told}. The last two are of a
-- job that is still running: the flag of its claim, and whether its holder is to be told. For each id:
-- 1 written, 0 not.
function change.change(now, ids, marks, afters)
  local records, lines, metas = values(JOB, ids), values(SINCE, ids), values(META, ids)
  local answers, jobs, since, enter, leave, forget = {}, {}, {}, {}, {}, {}
  local names, tags, request, clear, soonest, parks = {}, {}, {}, {}, {}, {}
  local left, workers, over = {}, {}, watched_ends()
  for i, id in ipairs(ids) do
    local record, old, after = records[i], lines[i], afters[i]
    if mark_of(record, old) ~= marks[i] then
      answers[i] = '0'
    else
      answers[i] = '1'
      local state, place, score, new, meta, flag, told = unpack(after)
      local key, member, from, was
      if record then key, member, from, was = stands(id, record, old) end
      put(jobs, JOB, id, new)
      local fence, upto, worker, rest, started, _
      if was == 'r' then
        fence, upto, _, worker, rest, started = last_claim(old)
        local asks = asked_member(worker, id)
        local stop = state == 'r' and (flag == '1' or flag == '3')
        if stop then put(request, ASKED, '0', asks) else put(clear, ASKED, asks) end
        if state == 'r' and told then put(request, TOLD, '0', asks) else put(clear, TOLD, asks) end
        if state == 'r' and (stop or told) then workers[worker] = true end
      end
      if state == 'r' then
        put(since, SINCE, id, claim_line(fence, upto, flag, worker, started) .. rest)
      else
        local queue = place:sub(3)
        if key then put(leave, key, member) end
        if old then put(forget, SINCE, id) end
        if has_progress(started) then put(forget, SINCE, progress_field(id)) end
        if from and from:sub(3) ~= queue then left[from:sub(3)] = true end
        put(names, NAMES, '0', queue)
        if state == 'p' then
          local parked = parking().as(id, new)
          put(enter, parked_set(queue), '0', parked)
          parks[queue] = parks[queue] or {}
          sooner(parks[queue], (parking().parts(parked)), score)
        else
          put(enter, set_of(state, place), score, id)
          if state == 'w' then sooner(soonest, queue, score) elseif over then over[#over + 1] = id end
        end
        if metas[i] and metas[i] ~= meta then
          for pair in tags_in(metas[i]) do put(leave, TAGS, pair .. '\n' .. id) end
          if not meta then put(forget, META, id) end
        end
        if meta and metas[i] ~= meta then
          put(jobs, META, id, meta)
          for pair in tags_in(meta) do put(tags, TAGS, '0', pair .. '\n' .. id) end
        end
      end
    end
  end
  local park = next(parks) and parking()
  local entries = park and park.entries_after(parks, now)
  write('HSET', jobs)
  write('HSET', since)
  write('ZREM', leave)
  write('HDEL', forget)
  write('ZREM', clear)
  write('ZADD', tags)
  write('ZADD', enter)
  write('ZADD', names)
  write('ZADD', request)
  if next(left) then forget_if_empty(left) end
  notify(soonest)
  if park then
    park.write_entries(entries)
    park.notify(parks)
  end
  for worker in pairs(workers) do call('PUBLISH', WAKE, 'a' .. worker) end
  tell_ends(over)
  return table.concat(answers)
end

-- The same, refused if memory is full: what others ask for makes jobs larger.
change.ask = change.change

return change
