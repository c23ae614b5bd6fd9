-- Write consecutive rows into pages, never leaving a gap. Returns 1, or 0 when rows before are missing.
-- KEYS: the page before the first when the rows begin a page and are not the first ones, then the
-- pages. ARGV: bytes of a page, offset of the rows in the first page, ms to live, '1' if the page
-- before is given, rows.
local page_bytes, offset, rows = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[5]
local first = 1
if ARGV[4] == '1' then
  if redis.call('STRLEN', KEYS[1]) < page_bytes then
    return 0
  end
  first = 2
elseif offset > 0 and redis.call('STRLEN', KEYS[1]) < offset then
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
