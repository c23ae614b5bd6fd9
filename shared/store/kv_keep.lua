-- Keep pages that were just set, whole and of consecutive numbers, and write the rows that begin the
-- one after them. Returns 1, or 0 when rows before are missing: then they are dropped again, as is
-- what the request shares with others.
-- KEYS: the list of shared pages, the page before the first unless that is number 0, the pages, and
-- the one after them if it gets rows.
-- ARGV: bytes of a page, ms to live, number of the first page, bytes of a list entry, and the rows.
local function length(key)
  local found = redis.pcall('STRLEN', key)
  if type(found) == 'table' then
    redis.call('DEL', key)  -- of another type: it holds no rows
    return 0
  end
  return found
end

local function drop(from, to)
  for i = from, to do
    redis.call('UNLINK', KEYS[i])
  end
end

local number, rows = tonumber(ARGV[3]), ARGV[5]
local first, last = number > 0 and 3 or 2, rows and #KEYS - 1 or #KEYS
local listed = length(KEYS[1])
local shared = math.floor(listed / tonumber(ARGV[4])) - number
if listed > 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
if shared < 0 and first == 3 and length(KEYS[2]) < tonumber(ARGV[1]) then
  drop(first, last)
  return 0
end
drop(first, math.min(first + shared - 1, last))
if rows and first + shared <= #KEYS then
  length(KEYS[#KEYS])
  redis.call('SETRANGE', KEYS[#KEYS], 0, rows)
  redis.call('PEXPIRE', KEYS[#KEYS], ARGV[2])
end
return 1
