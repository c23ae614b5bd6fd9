-- Write consecutive rows into pages, never leaving a gap. Returns 1, or 0 when rows before are missing.
-- Rows of pages that the request shares with others are there already and are left out.
-- KEYS: the list of shared pages, the page before the first when the rows begin a page and are not
-- the first ones, then the pages. ARGV: bytes of a page, offset of the rows in the first page, ms to
-- live, '1' if the page before is given, number of the first page, bytes of a list entry, rows.
local page_bytes, offset, rows = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[7]
local lengths = {}
for i = 1, #KEYS do
  lengths[i] = redis.pcall('STRLEN', KEYS[i])
  if type(lengths[i]) == 'table' then
    -- Of another type: it holds no rows, and goes, so that they can be written again.
    redis.call('DEL', KEYS[i])
    lengths[i] = 0
  end
end
local first = ARGV[4] == '1' and 3 or 2
local shared = math.floor(lengths[1] / tonumber(ARGV[6])) - tonumber(ARGV[5])
if lengths[1] > 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
if shared > #KEYS - first then
  return 1
elseif shared > 0 then
  rows = string.sub(rows, shared * page_bytes - offset + 1)
  first, offset = first + shared, 0
elseif shared < 0 and first == 3 then
  if lengths[2] < page_bytes then
    return 0
  end
elseif lengths[first] < offset then
  return 0
end
if first == #KEYS then
  redis.call('SETRANGE', KEYS[first], offset, rows)
  redis.call('PEXPIRE', KEYS[first], ARGV[3])
  return 1
end
local start = 1
for i = first, #KEYS do
  local stop = start + page_bytes - offset - 1
  redis.call('SETRANGE', KEYS[i], offset, string.sub(rows, start, stop))
  redis.call('PEXPIRE', KEYS[i], ARGV[3])
  start = stop + 1
  offset = 0
end
return 1
