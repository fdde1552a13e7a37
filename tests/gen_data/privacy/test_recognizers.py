"""Forms with their exact stretch, and the traps beside them; many more are in the labelled texts."""

from __future__ import annotations

import base64
import json

import pytest

from stages.gen_data.privacy import credentials
from stages.gen_data.privacy.ip import is_public
from stages.gen_data.privacy.numbers import is_iban, passes_luhn

PERSONAL = [
    ("write to jane.doe+x@example.co.uk, please", "write to <EMAIL_ADDRESS>, please"),
    ("<bob@sub.m\u00fcnchen.de>", "<<EMAIL_ADDRESS>>"),
    ("mail 'jane_doe@gmail.com' or bob@x.io.", "mail '<EMAIL_ADDRESS>' or <EMAIL_ADDRESS>."),
    ("a" * 100 + "@example.com", "a" * 36 + "<EMAIL_ADDRESS>"),
    ("ask bob@x.com.Then leave", "ask <EMAIL_ADDRESS>.Then leave"),
    ("\u627ebob@x.com\u6216\u8005", "\u627e<EMAIL_ADDRESS>\u6216\u8005"),
    ("jane\\_doe@x.com", "<EMAIL_ADDRESS>"),
    ("name [at] host [dot] com!", "<EMAIL_ADDRESS>!"),
    ("name(at)host.com. Bye", "<EMAIL_ADDRESS>. Bye"),
    ("Call 555-123-4567.", "Call <PHONE_NUMBER>."),
    ("It was (212) 555-0123 or 212.555.0124", "It was <PHONE_NUMBER> or <PHONE_NUMBER>"),
    ("She wrote +1 212 555 0123 on a card", "She wrote <PHONE_NUMBER> on a card"),
    ("+44 20 7946 0958, +49 30 901820", "<PHONE_NUMBER>, <PHONE_NUMBER>"),
    ("+380 (44) 364 55 85 +380 (44) 364 61 18", "<PHONE_NUMBER> <PHONE_NUMBER>"),
    ("in London: 020 7946 0958", "in London: <PHONE_NUMBER>"),
    ("my phone: 2125550123", "my phone: <PHONE_NUMBER>"),
    ("(02-3284-0396 / 010-9949-3703)", "(<PHONE_NUMBER> / <PHONE_NUMBER>)"),
    ("\u624b\u673a\u53f713812345678\uff0c", "\u624b\u673a\u53f7<PHONE_NUMBER>\uff0c"),
    ("pay with 4111 1111 1111 1111 now", "pay with <CREDIT_CARD> now"),
    ("378282246310005 or 5555-5555-5555-4444", "<CREDIT_CARD> or <CREDIT_CARD>"),
    ("send it to DE89 3704 0044 0532 0130 00 today", "send it to <IBAN_CODE> today"),
    ("219-09-9999", "<US_SSN>"),
    ("her social security number is 219099999", "her social security number is <US_SSN>"),
    ("ping 8.8.8.8 and 2001:4860:4860::8888", "ping <IP_ADDRESS> and <IP_ADDRESS>"),
    ("ssh root@20.83.29.100", "ssh root@<IP_ADDRESS>"),
    ("to 1BvBMSEYstWetqTFn5Au4m4GFg7xJaNVN2,", "to <CRYPTO>,"),
    ("0xd8dA6BF26964aF9D7eEd9e03E53415D37aA96045", "<CRYPTO>"),
    ("postgres://app:s3cr3tPw9@db.example.com/x", "postgres://app:<SECRET>@db.example.com/x"),
    ("password: hunter2, ok", "password: <SECRET>, ok"),
    ('password = "S3cret!pw"', 'password = "<SECRET>"'),
    ("rapidApiKey: '755950f555msh2ec56c134a0bf'", "rapidApiKey: '<SECRET>'"),
    ("define('DB_PASSWORD', 'x9Kf02mQz');", "define('DB_PASSWORD', '<SECRET>');"),
]
HARMLESS = [
    "192.168.0.1, 10.0.0.1, 172.16.3.4, 127.0.0.1, 169.254.1.1, 0.0.0.0, 255.255.255.0, ::1, fe80::1",
    "192.0.2.1, 198.51.100.7, 203.0.113.9, 2001:db8::1, 224.0.0.1",
    "version 1.2.3.4, v2.0.0.1, v10.0.0.1, 1.2.3.4-beta, lib@1.2.3.4",
    "std::face::add(a::b), 12:34:56, 00:11:22:33:44:55",
    "2024-01-15, 31/12/1999, 01-02-2003, 2023-2024 10:30:45",
    "x = 12 34 56 78 90; 03 06 09 12 15; 4 8 15 16 23 42; 1-2-3-4-5-6-7-8-9",
    "Is 2147483647 prime? call f(1000000007)",
    "100 200 3000, 555-123 = 432, 123 45 6789, what is 100-50-1000?",
    "028 029 030 031 032, 4e 4c 34 35 01 06 29 01 02 04",
    "3.14159265358979323846, 0.2079460958, 6.02214076e23, 1,234,567,890",
    "the number 3141592653589793, 4111111111111112, timestamp 1700000000",
    "978-3-16-148410-0, ISBN 9783161484100, order 212-555-0123",
    "C = A@B.T, np.li @ x, @app.route('/x'), user@localhost, x@w.to(d), q@k.mT, git@github.com:a/b",
    "look at example dot com",
    "My name is Ada, I live in Paris, see https://example.com on Monday.",
    "password = getpass(), password: str, password = config.password, password: required|min:8",
    "api_key = os.getenv('X'), token = tokenizer.encode(text), https://user:pass@example.com",
    "-----BEGIN PRIVATE KEY----- is a header; AKIA is a prefix; sk-learn; hf_hub_download",
    "0x0000000000000000000000000000000000000000",
]


@pytest.mark.parametrize(("text", "expected"), PERSONAL)
def test_personal_data_become_placeholders(scrub, text, expected):
    assert scrub(text) == expected


@pytest.mark.parametrize("text", HARMLESS)
def test_numbers_code_dates_names_and_private_addresses_stay(scrub, text):
    assert scrub(text) == text


def test_a_placeholder_is_no_finding(scrub):
    text = "<EMAIL_ADDRESS> <PHONE_NUMBER> password: <SECRET> https://bob:<SECRET>@x.com"
    assert scrub(text) == text


def test_only_an_object_that_names_its_algorithm_begins_a_web_token(scrub):
    def token(header: object) -> str:
        parts = (base64.urlsafe_b64encode(json.dumps(part).encode()) for part in (header, {"sub": "12345"}))
        return b".".join(part.rstrip(b"=") for part in parts).decode() + ".c2lnbmF0dXJl"

    assert scrub(f"see {token({'alg': 'none'})}") == "see <SECRET>"
    assert "<SECRET>" not in scrub(f"see {token({'name': 'x'})}")


@pytest.mark.parametrize("end", ["\n-----END PRI" + "VATE KEY-----", ""])
def test_a_private_key_is_found_whole_and_cut_off(scrub, end):
    body = "\n".join(["MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSj+/ab"] * 3)
    assert scrub(f"key:\n-----BEGIN PRIVATE KEY-----\n{body}{end}") == "key:\n<SECRET>"


def test_check_digits():
    assert passes_luhn("4111 1111 1111 1111")
    assert not passes_luhn("4111 1111 1111 1112")
    assert is_iban("GB29NWBK60161331926819")
    assert not is_iban("GB29NWBK60161331926818")
    assert not is_iban("GB29NWBK6016133192681")


@pytest.mark.parametrize("address", ["93.184.216.34", "93.184.216.34/32", "2a00:1450::1:2", "::ffff:8.8.8.8"])
def test_addresses_of_machines_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "address", ["10.1.2.3", "::ffff:10.0.0.1", "100.64.0.1", "3fff::1", "x", "1.2.3", "2000::3"]
)
def test_addresses_of_nobody_are_not(address):
    assert not is_public(address)


def test_every_name_of_a_secret_passes_the_quick_look_for_names():
    names = (*credentials._PASSWORD_NAMES, *credentials._KEY_NAMES)
    assert [name for name in names if not credentials.may_have_credentials(name.lower())] == []
