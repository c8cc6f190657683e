"""The page in a browser, without a network: filters, keys, colours, two trajectories side by side, hostile texts."""

import shutil

import pytest
from viewer_cases import HOSTILE, make_many

from flowgrpo.report.viewer import viewer

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs a browser: apt-get install chromium chromium-driver, and '.[test]'"
    ),
]
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,800")
OPENED = "return [...document.querySelectorAll('article')].map(each => each.querySelector('.place').textContent)"


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
    )
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    names = {"ratio": "π(update 9) / π(sampled)"}
    return viewer(make_many(), tmp_path_factory.mktemp("page") / "page.html", title="Rollouts", names=names)


@pytest.fixture
def page(browser, path):
    """The page as it is first opened; whatever a test does, nothing is complained of."""
    browser.get("about:blank")
    browser.get(path.as_uri())
    yield browser
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []
    assert browser.title == "Rollouts"


def press(page, keys: str) -> None:
    page.find_element("css selector", "body").send_keys(keys)


def choose(page, name: str, value: str) -> str:
    """Set a filter; what is counted then."""
    page.execute_script(
        "const field = document.getElementById('filters').elements[arguments[0]];"
        "field.value = arguments[1]; field.dispatchEvent(new Event('input', {bubbles: true}))",
        name,
        value,
    )
    return page.find_element("id", "count").text


def backgrounds(page) -> list[str]:
    return page.execute_script(
        "return [...document.querySelectorAll('.action .t')].map(t => getComputedStyle(t).backgroundColor)"
    )


def opened(page) -> list[str]:
    return page.execute_script(OPENED)


@pytest.mark.parametrize(
    ("name", "value", "counted"),
    [
        ("domain", "code", "8 of 20, 6 solved (100 %)"),
        ("phase", "test before", "6 of 20, 0 solved (0 %)"),
        ("outcome", "invalid", "2 of 20"),
        ("status", "VERIFIER_FAILURE", "2 of 20"),
        ("tool", "calculator", "12 of 20, 3 solved (25 %)"),
        ("changed", "failed → solved", "6 of 20, 3 solved (50 %)"),
        ("turns-low", "3", "6 of 20, 6 solved (100 %)"),
        ("reward-high", "0.5", "9 of 20, 0 solved (0 %)"),
        ("update-low", "4", "8 of 20, 6 solved (100 %)"),
        ("search", "T3 what", "2 of 20, 1 solved (50 %)"),
        ("search", "nowhere", "0 of 20"),
    ],
)
def test_filters_count_what_passes(page, name, value, counted):
    assert choose(page, name, value) == counted
    page.find_element("css selector", "#filters [type=reset]").click()
    assert page.execute_async_script("setTimeout(() => arguments[0](document.getElementById('count').textContent), 50)")
    assert page.find_element("id", "count").text.startswith("20 of 20")


def test_filters_combine_and_what_is_no_number_bounds_nothing(page):
    choose(page, "domain", "mathematics")
    assert choose(page, "outcome", "solved").startswith("3 of 20")
    assert choose(page, "turns-low", "many").startswith("3 of 20")
    assert page.find_element("name", "turns-low").get_attribute("aria-invalid") == "true"


def test_the_list_is_sorted(page):
    choose(page, "sort", "reward, high first")
    shown = [each.text for each in page.find_elements("css selector", ".row .reward")]
    assert shown == sorted(shown, key=lambda text: -1.0 if text == "\u2013" else float(text), reverse=True)


def test_keys_go_through_trajectories_and_turns(page):
    assert "t0" in opened(page)[0]
    press(page, "jj")
    assert "t2" in opened(page)[0]
    press(page, "k")
    assert "t1" in opened(page)[0]
    press(page, "G")
    assert "c2" in opened(page)[0]
    press(page, "gn")
    current = "return [...document.querySelectorAll('.turn')].findIndex(turn => turn.classList.contains('current'))"
    assert page.execute_script(current) == 0
    press(page, "n")
    assert page.execute_script(current) == 1
    press(page, "p")
    assert page.execute_script(current) == 0


def test_the_search_takes_its_keys_and_gives_them_back(page):
    press(page, "/")
    search = page.switch_to.active_element
    search.send_keys("t4jj")
    assert page.find_element("id", "count").text.startswith("0 of 20")
    search.send_keys("\ue003\ue003\ue00c")  # two backspaces, escape
    press(page, "j")
    assert "test after" in opened(page)[0]


def test_help_opens_and_closes(page):
    press(page, "?")
    assert page.execute_script("return document.getElementById('help').open")
    press(page, "\ue00c")
    assert not page.execute_script("return document.getElementById('help').open")


def test_every_colouring_has_its_colours_and_its_legend(page):
    choose(page, "domain", "code")
    clear = "rgba(0, 0, 0, 0)"
    legend = page.find_element("id", "legend")
    masks = backgrounds(page)
    assert len(set(masks)) == 1
    assert masks[0] != clear
    seen = {}
    for name in ("log-probability", "advantage", "π(update 9) / π(sampled)", "weight version"):
        press(page, "c")
        assert legend.text.startswith(name)
        seen[name] = backgrounds(page)
    assert len(set(seen["log-probability"])) == 3  # 0, -1, -2 of the longest action
    advantages, ratios = seen["advantage"], seen["π(update 9) / π(sampled)"]
    assert advantages[0] != advantages[1] == advantages[3] == advantages[4] != clear
    assert ratios[0] != ratios[1]
    assert len(set(seen["weight version"])) == 2
    press(page, "c")
    assert legend.text.startswith("mask")


def test_a_colouring_that_is_not_there_says_why(page):
    press(page, "cc")
    assert "not recorded for this trajectory" in page.find_element("id", "legend").text


def test_a_token_tells_its_figures(page):
    choose(page, "domain", "code")
    press(page, "\ue014")  # right
    tip = page.find_element("id", "tip").text.split("\n")
    assert tip[tip.index("token id") + 1].isdigit()
    press(page, "n\ue014")
    words = page.find_element("id", "tip").text
    assert "chosen" in words
    assert "+0.5000" in words
    assert "1.2500" in words


def test_contexts_fold_and_unfold(page):
    opens = "return [...document.querySelectorAll('details.context')].map(each => each.open)"
    assert page.execute_script(opens) == [True, True]
    press(page, "f")
    assert page.execute_script(opens) == [False, False]
    press(page, "jf")
    assert page.execute_script(opens) == [True, True]
    assert len(page.find_elements("css selector", ".said .t")) == 4


def test_the_same_task_before_and_after_stands_side_by_side(page):
    choose(page, "phase", "test after")
    press(page, "jjjb")
    before, after = opened(page)
    assert "test before" in before
    assert "test after" in after
    assert "t3" in before
    assert "t3" in after
    press(page, "n")
    assert page.execute_script("return document.querySelectorAll('.turn.current').length") == 2
    press(page, "b")
    assert len(opened(page)) == 1


def test_an_address_opens_the_same_again(page, path):
    choose(page, "domain", "code")
    press(page, "jcb")
    address, shown = page.current_url, opened(page)
    page.get("about:blank")
    page.get(address)
    assert address.startswith(path.as_uri() + "#")
    assert opened(page) == shown
    assert page.find_element("id", "legend").text.startswith("log-probability")


def test_hostile_text_is_shown_and_does_nothing(page):
    choose(page, "outcome", "invalid")
    shown = page.find_element("css selector", "h2").text
    assert shown == HOSTILE.replace("\u202e", "⟨U+202E⟩")
    assert page.find_elements("css selector", "main img, main script") == []
    assert page.find_element("css selector", ".said").text.replace("\n", "").startswith("</script>")
    press(page, "j")
    assert "never began" in page.find_element("tag name", "main").text


def test_the_calls_of_a_turn_and_the_verdict_are_shown(page):
    words = page.find_element("tag name", "article").text
    for part in ("calculator", "2 +", "it is not complete", "error", "Gold", "5", "failed", "reward 0.250", "1.50 s"):
        assert part in words
