"""What programs of macOS print, as documented, and what the probe reads from it."""

from __future__ import annotations

import json
import sys

import pytest

from allhands.cluster.doctor.facts import HostFacts, Interface, Mac
from allhands.cluster.probes import computer, mac, network

PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 5c:1b:f4:00:00:01

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 36:6b:46:00:00:00

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 5c:1b:f4:00:00:02

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 36:6b:46:00:00:00

Hardware Port: Thunderbolt 2
Device: en3
Ethernet Address: 36:6b:46:00:00:04

Hardware Port: USB 10/100/1000 LAN
Device: en7
Ethernet Address: 00:e0:4c:00:00:07

VLAN Configurations
===================
"""

IFCONFIG = """lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\toptions=1203<RXCSUM,TXCSUM,TXSTATUS,SW_TIMESTAMP>
\tinet 127.0.0.1 netmask 0xff000000
\tinet6 ::1 prefixlen 128
\tinet6 fe80::1%lo0 prefixlen 64 scopeid 0x1
\tnd6 options=201<PERFORMNUD,DAD>
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 9000
\toptions=567<RXCSUM,TXCSUM,VLAN_MTU,TSO4,TSO6,AV,CHANNEL_IO>
\tether 5c:1b:f4:00:00:01
\tinet 10.0.0.5 netmask 0xffffff00 broadcast 10.0.0.255
\tmedia: autoselect (10Gbase-T <full-duplex>)
\tstatus: active
en1: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 5c:1b:f4:00:00:02
\tinet6 fe80::cc3:1111:2222:3333%en1 prefixlen 64 secured scopeid 0xb
\tinet 192.168.1.23 netmask 0xfffffe00 broadcast 192.168.1.255
\tmedia: autoselect
\tstatus: active
en2: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500
\toptions=460<TSO4,TSO6,CHANNEL_IO>
\tether 36:6b:46:00:00:00
\tmedia: autoselect <full-duplex>
\tstatus: inactive
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\toptions=63<RXCSUM,TXCSUM,TSO4,TSO6>
\tether 36:6b:46:00:00:00
\tinet 169.254.10.7 netmask 0xffff0000 broadcast 169.254.255.255
\tConfiguration:
\t\tid 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
\tmember: en2 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 9 priority 0 path cost 0
\tmember: en3 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 10 priority 0 path cost 0
\tmedia: <unknown type>
\tstatus: active
en7: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmedia: autoselect (1000baseT <full-duplex>)
\tstatus: active
utun4: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1280
\tinet 100.64.0.1 --> 100.64.0.1 netmask 0xffffffff
awdl0: flags=8843<UP,BROADCAST,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tstatus: active
"""


@pytest.fixture(scope="module")
def interfaces() -> dict[str, Interface]:
    found = mac.parse_ifconfig(IFCONFIG, mac.parse_hardware_ports(PORTS))
    return {one["name"]: Interface.model_validate(one) for one in found}


def test_kinds_states_and_sizes(interfaces: dict[str, Interface]) -> None:
    assert {name: (one.kind, one.up, one.mtu) for name, one in interfaces.items()} == {
        "lo0": ("loopback", True, 16384),
        "en0": ("ethernet", True, 9000),
        "en1": ("wifi", True, 1500),
        "en2": ("thunderbolt", False, 1500),
        "bridge0": ("bridge", True, 1500),
        "en7": ("ethernet", True, 1500),
        "utun4": ("tunnel", True, 1280),
        "awdl0": ("virtual", True, 1500),
    }


def test_addresses_speeds_and_members(interfaces: dict[str, Interface]) -> None:
    addresses = {
        name: [(a.ip, a.prefix) for a in one.addresses] for name, one in interfaces.items()
    }
    assert addresses["en0"] == [("10.0.0.5", 24)]
    assert addresses["en1"] == [("192.168.1.23", 23), ("fe80::cc3:1111:2222:3333", 64)]
    assert addresses["bridge0"] == [("169.254.10.7", 16)]
    assert addresses["utun4"] == [("100.64.0.1", 32)]
    assert [interfaces[name].speed_mbps for name in ("en0", "en1", "en7")] == [10000, None, 1000]
    assert interfaces["bridge0"].members == ("en2", "en3")


def test_routes() -> None:
    text = """   route to: 10.0.0.6
destination: 10.0.0.0
       mask: 255.255.255.0
  interface: en0
      flags: <UP,DONE,CLONING,STATIC>
 recvpipe  sendpipe  ssthresh  rtt,msec    rttvar  hopcount      mtu     expire
"""
    assert network.parse_mac_route(text) == {"interface": "en0", "gateway": None}
    by = text.replace("  interface: en0", "    gateway: 192.168.1.1\n  interface: en1")
    assert network.parse_mac_route(by) == {"interface": "en1", "gateway": "192.168.1.1"}
    assert (
        network.parse_mac_route("route: writing to routing socket: not in table\n")["interface"]
        is None
    )


PMSET = """System-wide power settings:
Currently in use:
 standby              0
 Sleep On Power Button 1
 autorestart          0
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                %s
 ttyskeepawake        1
 displaysleep         10
 womp                 1
"""
ASSERTIONS = """2026-11-21 09:00:00 +0100
Assertion status system-wide:
   BackgroundTask                 0
   ApplePushServiceTask           0
   UserIsActive                   1
   PreventUserIdleDisplaySleep    0
   PreventSystemSleep             0
   ExternalMedia                  0
   PreventUserIdleSystemSleep     %d
   NetworkClientActive            0
Listed by owning process:
"""


@pytest.mark.parametrize(
    ("value", "minutes"), [("0", 0), ("1", 1), ("15 (sleep prevented by caffeinate, powerd)", 15)]
)
def test_sleep(value: str, minutes: int) -> None:
    assert mac.parse_sleep(PMSET % value) == minutes


def test_sleep_is_not_that_of_disks_and_displays() -> None:
    assert mac.parse_sleep(PMSET.replace(" sleep                %s\n", "")) is None


def test_kept_awake() -> None:
    assert not mac.kept_awake(ASSERTIONS % 0)
    assert mac.kept_awake(ASSERTIONS % 1)


DISPLAY = """Graphics/Displays:

    Apple M4 Max:

      Chipset Model: Apple M4 Max
      Metal Support: Metal 4
      Displays:
        Studio Display:
          Resolution: 5120 x 2880 Retina
          Main Display: Yes
          Mirror: Off
          Online: Yes
%s"""


@pytest.mark.parametrize(
    ("text", "on"),
    [
        (DISPLAY % "", 1),
        (DISPLAY % "          Display Asleep: Yes\n", 0),
        ("Graphics/Displays:\n\n    Apple M4 Max:\n\n      Chipset Model: Apple M4 Max\n", 0),
        (None, None),
    ],
)
def test_displays(text: str | None, on: int | None) -> None:
    assert mac.parse_displays(text) == on


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("Firewall is enabled. (State = 1)\n", True),
        ("Firewall is enabled. (State = 2)\n", True),
        ("Firewall is disabled. (State = 0)\n", False),
        ("", None),
    ],
)
def test_firewall(text: str, on: bool | None) -> None:
    assert mac.parse_firewall(text) is on


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("Firewall has block all state set to enabled.\n", True),
        ("Firewall has block all state set to disabled.\n", False),
        ("Block all ENABLED!\n", True),
        ("Block all DISABLED!\n", False),
        ("", False),
    ],
)
def test_block_all(text: str, blocks: bool) -> None:
    assert mac.parse_block_all(text) is blocks


def test_thunderbolt_ports() -> None:
    text = json.dumps(
        {
            "SPThunderboltDataType": [
                {
                    "_name": "thunderboltusb4_bus_0",
                    "device_name_key": "Mac Studio",
                    "domain_uuid_key": "AAAA-0",
                    "receptacle_1_tag": {
                        "current_speed_key": "80 Gb/s",
                        "receptacle_id_key": "1",
                        "receptacle_status_key": "receptacle_connected",
                    },
                    "_items": [{"_name": "Mac Studio", "domain_uuid_key": "BBBB-0"}],
                },
                {
                    "_name": "thunderboltusb4_bus_1",
                    "domain_uuid_key": "AAAA-1",
                    "receptacle_1_tag": {
                        "current_speed_key": "Up to 120 Gb/s",
                        "receptacle_id_key": "2",
                        "receptacle_status_key": "receptacle_no_devices_connected",
                    },
                },
            ]
        }
    )
    assert mac.parse_thunderbolt(text) == [
        {
            "receptacle": "1",
            "connected": True,
            "speed": "80 Gb/s",
            "domain": "AAAA-0",
            "peers": ["BBBB-0"],
        },
        {
            "receptacle": "2",
            "connected": False,
            "speed": "Up to 120 Gb/s",
            "domain": "AAAA-1",
            "peers": [],
        },
    ]
    for nothing in ("", "{}", "not json", '{"SPThunderboltDataType": null}'):
        assert mac.parse_thunderbolt(nothing) == []


def test_memory() -> None:
    text = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              100000.
Pages active:                           1000000.
Pages inactive:                          200000.
Pages speculative:                        30000.
Pages throttled:                              0.
Pages wired down:                        150000.
Pages purgeable:                           4000.
"""
    assert computer.parse_vm_stat(text) == 16384 * (100000 + 200000 + 30000 + 4000)


def test_the_facts_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        ("pmset", "-g"): PMSET % 1,
        ("pmset", "-g", "assertions"): ASSERTIONS % 0,
        ("sysctl", "-n", "iogpu.wired_limit_mb"): "57344\n",
        (sys.executable, "-c"): "60129542144\n",
        ("system_profiler", "SPDisplaysDataType"): DISPLAY % "",
        ("networksetup", "-listallhardwareports"): PORTS,
        ("ifconfig", "-a"): IFCONFIG,
    }

    def said_by(argv: list[str], timeout_s: float = 8.0) -> str | None:
        return said.get(tuple(argv[:2] if argv[0] == sys.executable else argv))

    monkeypatch.setattr(mac, "output_of", said_by)
    found = HostFacts.model_validate({"mac": mac.mac_facts(), "interfaces": mac.mac_interfaces()})
    assert found.mac == Mac(
        sleep_minutes=1,
        kept_awake=False,
        displays_on=1,
        working_set=60129542144,
        wired_limit_mb=57344,
    )
    assert len(found.interfaces) == 8
